"""Adapters of peft beside a model: refused, or merged as peft does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from distill.choices import Student
from distill.student import student_config
from foundation.core.errors import InputError
from foundation.models.checkpoint import load
from foundation.models.config import ModelConfig, label_names
from foundation.models.forward import forward
from foundation.models.importing import check_model, import_model
from tests.foundation import tiny_gpt
from tests.foundation.model_folders import LABELS, named, refused
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

IDS = torch.tensor([[2, 7, 9, 11, 3]])
TARGETS = {"SEQ_CLS": ["query", "value"], "CAUSAL_LM": ["c_attn"]}


def adapt(folder: Path, auto: Any, task: str) -> torch.Tensor:
    """Writes an adapter of random weights beside a model; returns the logits of peft."""
    torch.manual_seed(0)
    settings = LoraConfig(task_type=task, r=4, lora_alpha=800, target_modules=TARGETS[task], init_lora_weights=False)
    base = shutil.copytree(folder, folder.parent / "base")
    get_peft_model(auto.from_pretrained(base), settings).save_pretrained(folder)
    wrapped = PeftModel.from_pretrained(auto.from_pretrained(base).eval(), folder).eval()
    with torch.inference_mode():
        logits: torch.Tensor = wrapped(input_ids=IDS).logits
        assert not torch.allclose(logits, auto.from_pretrained(base)(input_ids=IDS).logits, atol=5e-3)
    return logits


@pytest.fixture
def adapted(folder: Path) -> Path:
    """A classifier with an adapter beside its weights."""
    adapt(folder, AutoModelForSequenceClassification, "SEQ_CLS")
    return folder


@pytest.mark.parametrize("head", ["keep", "new"])
def test_an_adapter_is_refused_until_the_recipe_says_what_to_do(head: Any, adapted: Path, out: Path) -> None:
    message = r"model.path: .* an adapter of peft \(.?LORA.?, for .*base.*\) beside .*model.adapter: merge.*remove adapter_config.json"
    for task in ("text-classification", "sentence-embedding"):
        with pytest.raises(InputError, match=message):
            check_model(ModelConfig(path=str(adapted), task=task, head=head if task == "text-classification" else "keep"), 2)
    if head == "keep":
        with pytest.raises(InputError, match=message):
            label_names(named(adapted))
    refused(named(adapted, head=head), out, message)


def test_a_merged_classifier_gives_the_logits_of_peft(folder: Path, out: Path) -> None:
    expected = adapt(folder, AutoModelForSequenceClassification, "SEQ_CLS")
    config = named(folder, adapter="merge")
    assert label_names(config) == LABELS
    check_model(config, 2)
    assert import_model(config, LABELS, 0, out)["new_weights"] == []
    with torch.inference_mode():
        assert torch.allclose(forward(load(out), {"input_ids": IDS}), expected, atol=1e-5)
    assert not (out / "adapter_config.json").exists()


def test_a_new_head_is_the_only_thing_that_is_new(folder: Path, out: Path) -> None:
    adapt(folder, AutoModelForSequenceClassification, "SEQ_CLS")
    assert import_model(named(folder, adapter="merge", head="new"), LABELS, 0, out)["new_weights"] == [
        "classifier.bias",
        "classifier.weight",
    ]
    base = AutoModelForSequenceClassification.from_pretrained(folder.parent / "base").eval()
    whole: Any = PeftModel.from_pretrained(base, folder).merge_and_unload()
    written = load(out).state_dict()
    assert all(torch.allclose(written[name], value, atol=1e-6) for name, value in whole.state_dict().items() if "classifier" not in name)


def test_a_merged_language_model_gives_the_logits_of_peft(tmp_path: Path, out: Path) -> None:
    folder = shutil.copytree(tiny_gpt.checkpoint(), tmp_path / "gpt")
    expected = adapt(folder, AutoModelForCausalLM, "CAUSAL_LM")
    refused(ModelConfig(path=str(folder), task="text-generation"), out, "beside the weights of the model", ())
    import_model(ModelConfig(path=str(folder), task="text-generation", adapter="merge"), (), 0, out)
    with torch.inference_mode():
        assert torch.allclose(forward(load(out), {"input_ids": IDS}), expected, atol=1e-5)


@pytest.mark.parametrize("lost", [["model.safetensors"], ["model.safetensors", "config.json"]])
def test_an_adapter_alone_is_named_with_its_base(lost: list[str], adapted: Path, out: Path) -> None:
    for name in lost:
        (adapted / name).unlink()
    for adapter in (None, "merge"):
        refused(named(adapted, adapter=adapter, head="new"), out, r"holds an adapter of peft .*base.*\) alone, without the weights")


def test_what_cannot_be_merged_is_one_line(folder: Path, tiny_bert: Path, out: Path) -> None:
    with raises_problem("model.adapter", "merge", "no adapter_config.json", "leave it out"):
        check_model(named(tiny_bert, adapter="merge"), 2)
    adapt(folder, AutoModelForSequenceClassification, "SEQ_CLS")
    file = folder / "adapter_model.safetensors"
    whole = load_file(file)
    first = next(name for name in whole if "lora_A" in name)
    for change, match in (
        ({first: whole[first] * torch.nan}, f"{first} has values that are NaN"),
        ({first: whole[first][:2].contiguous()}, "cannot be merged"),
        ({f"{first}x": whole[first].clone()}, "does not fit the model"),
    ):
        save_file({**whole, **change}, file)
        refused(named(folder, adapter="merge"), out, match)
    file.write_bytes(b"no")
    refused(named(folder, adapter="merge"), out, "cannot be read")
    file.unlink()
    refused(named(folder, adapter="merge"), out, "has no adapter_model.safetensors")


def test_an_adapter_needs_a_trained_model() -> None:
    with pytest.raises(ValidationError, match="adapter: given without path"):
        ModelConfig(config={"model_type": "bert"}, init="random", task="text-classification", adapter="merge")


def test_a_student_with_an_adapter_is_refused_by_its_own_key(adapted: Path, told: Any) -> None:
    with pytest.raises(InputError, match=r"stages.distill.student.path: .* beside the weights"):
        student_config(Student(path=str(adapted)), None, "stages.distill.student")
