"""A model that is built from a config shares the weights that its source shares, whatever its config says."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from compress.run.disk import parameters_of
from distill.distill import Distill
from foundation.artifacts.artifact import Artifact
from foundation.labels.tasks import Task
from foundation.models.architecture.shapes import on_meta, remade
from foundation.models.checkpoint import load, save
from foundation.models.config import ModelConfig
from foundation.models.importing import check_model, import_model
from foundation.models.library import quiet, with_class
from foundation.models.size import count
from foundation.models.tied import apart, shared_as
from tests.architectures.rebuilt import tied
from tests.export.generation.genai_checkpoints import tokenizer
from tests.export.generation.tiny_encoder_decoders import T5, context, preprocessor

HEAD, TABLE = "lm_head.weight", "shared.weight"
GATED = {**T5, "feed_forward_proj": "gated-gelu"}


def flan_t5(folder: Path) -> Path:
    """Writes a checkpoint as those of Flan-T5 are: `tie_word_embeddings: false`, and a head of its own; returns its folder."""
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**GATED, tie_word_embeddings=False))
    model.lm_head.weight = nn.Parameter(0.3 * torch.randn_like(model.lm_head.weight))
    with quiet():
        model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    preprocessor().save(folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw.pop("scale_decoder_outputs")
    (folder / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}), encoding="utf-8")
    return folder


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 11)[None]
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=ids[:, :4]).logits
    return found


def test_transformers_ties_the_config_of_flan_t5_and_not_its_weights(tmp_path: Path) -> None:
    """What the mend stands on, asked of the library: the flag becomes another one, and two stored weights stay two."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(flan_t5(tmp_path))
    assert model.config.tie_word_embeddings is True
    assert model.config.scale_decoder_outputs is False
    assert model.lm_head.weight is not model.shared.weight
    built = transformers.AutoModelForSeq2SeqLM.from_config(model.config)
    assert built.lm_head.weight is built.shared.weight


@pytest.mark.whole
def test_flan_t5_is_imported_built_again_and_saved_with_its_own_head(tmp_path: Path) -> None:
    source, out, again = (tmp_path / name for name in ("source", "out", "again"))
    for folder in (source, out, again):
        folder.mkdir()
    reference = logits(transformers.AutoModelForSeq2SeqLM.from_pretrained(flan_t5(source)).eval())
    import_model(ModelConfig(path=str(source), task="text-to-text"), (), 0, out)
    model: Any = load(out)
    assert torch.equal(logits(model), reference)
    small = remade(model, model.config)
    small.load_state_dict(model.state_dict())
    assert torch.allclose(logits(small.eval()), reference, atol=1e-5)
    save(small, out, again, "Built again.")
    assert torch.allclose(logits(load(again)), reference, atol=1e-5)
    assert count(model, "text-to-text", 8).parameters == sum(value.numel() for value in load_file(again / "model.safetensors").values())


@pytest.mark.parametrize("own_head", [True, False])
def test_sharing_follows_the_source(own_head: bool) -> None:
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    source, made = transformers.GPT2LMHeadModel(config), transformers.GPT2LMHeadModel(config)
    if own_head:
        source.lm_head.weight = nn.Parameter(torch.randn(20, 8))
    shared_as(made, source)
    assert tied(made) == ([] if own_head else [{HEAD, "transformer.wte.weight"}])
    made.load_state_dict(source.state_dict())
    assert torch.equal(made.lm_head.weight, source.lm_head.weight)
    assert torch.equal(made.transformer.wte.weight, source.transformer.wte.weight)
    made.tie_weights(recompute_mapping=False)  # as Transformers does after it loads weights
    assert tied(made) == ([] if own_head else [{HEAD, "transformer.wte.weight"}])


def test_weights_with_no_owner_stay_as_the_config_says() -> None:
    made = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
    apart(made, [HEAD])
    assert tied(made) == [{HEAD, TABLE, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}]
    apart(made, [TABLE, HEAD])
    assert tied(made) == [{TABLE, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}]


def test_a_model_without_values_is_tied_as_its_source() -> None:
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    made = on_meta(with_class(config, "text-generation"))
    assert not tied(made)
    shared_as(made, transformers.GPT2LMHeadModel(config))
    assert tied(made) == [{HEAD, "transformer.wte.weight"}]


def test_shared_weights_count_once() -> None:
    """T5 looks at values, so it is built on the CPU to be counted."""
    config = transformers.T5Config(**GATED)
    with quiet():
        model = transformers.T5ForConditionalGeneration(config)
    assert count(config, "text-to-text", 8).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("own_head", [True, False], ids=["own head", "the same values twice"])
def test_a_plan_counts_the_head_as_it_is_stored(tmp_path: Path, own_head: bool) -> None:
    """Transformers 5.23 reads the config of both as tied; two stored names are two weights only where their values differ."""
    source = flan_t5(tmp_path)
    stored = load_file(source / "model.safetensors")
    if not own_head:
        save_file({**stored, HEAD: stored[TABLE].clone()}, source / "model.safetensors", metadata={"format": "pt"})
    config = check_model(ModelConfig(path=str(source), task="text-to-text", head="keep"), max_length=8).config
    parameters = sum(tensor.numel() for tensor in stored.values()) - (0 if own_head else stored[HEAD].numel())
    shorter = copy.deepcopy(config)
    shorter.num_layers = 1
    less = sum(tensor.numel() for name, tensor in stored.items() if name.startswith("encoder.block.1."))
    assert count(config, "text-to-text", 8).parameters == parameters
    assert count(shorter, "text-to-text", 8).parameters == parameters - less
    assert parameters_of(config, "text-to-text", None)[0] == parameters


def test_a_new_head_leaves_the_tables_of_a_body_apart(tmp_path: Path) -> None:
    """BART's classifier reads two tables; files of which may hold two."""
    task: Task = "text-classification"
    source, out = tmp_path / "source", tmp_path / "out"
    out.mkdir()
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(**sizes, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=200, max_position_embeddings=40)
    with quiet():
        transformers.BartForSequenceClassification(config).save_pretrained(source)
    stored = load_file(source / "model.safetensors")
    names = [f"model.{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")]
    stored |= {name: torch.randn(200, 16) for name in names}
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save_pretrained(source)
    import_model(ModelConfig(path=str(source), task=task, head="new"), ("a", "b"), 0, out)
    written = load(out).state_dict()
    assert all(torch.equal(written[name], stored[name]) for name in names)


@pytest.mark.whole
def test_a_student_of_all_layers_that_does_not_learn_has_the_perplexity_of_flan_t5(tmp_path: Path) -> None:
    given, source, out = context("t5", tmp_path), tmp_path / "source", tmp_path / "out"
    out.mkdir()
    teacher = Artifact(flan_t5(source), {"id": "baseline", "digest": "flan-t5", "stage": "model"})
    given = replace(given, teachers=(teacher,), checkpoints={"baseline": teacher})
    stage = Distill.model_validate({"student": {}, "loss": "soft_target", "epochs": 1, "batch_size": 8, "learning_rate": 1e-9})
    stage.check(load(source).config, load(source).config, given)
    stage.run(teacher, given, out)
    rows = given.data.evaluation.rows
    assert perplexity(load(out), rows) == pytest.approx(perplexity(load(source), rows), rel=1e-5)


def perplexity(model: Any, rows: Any) -> float:
    """Returns the perplexity of the targets of pairs of tokens, one by one."""
    losses = []
    for row in rows:
        source, target = (torch.from_numpy(part.astype(np.int64))[None] for part in (row.source, row.target))
        before = torch.cat([torch.full((1, 1), model.config.decoder_start_token_id), target[:, :-1]], dim=1)
        with torch.inference_mode():
            found = model(input_ids=source, attention_mask=torch.ones_like(source), decoder_input_ids=before).logits
        losses.append(nn.functional.cross_entropy(found[0], target[0], reduction="none"))
    return float(torch.cat(losses).mean().exp())
