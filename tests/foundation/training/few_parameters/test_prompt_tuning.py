"""Prompt tuning and P-tuning: what is trained, that the result computes what peft's model computes, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import peft
import pytest
import torch
import transformers
from pydantic import ValidationError

from distill.choices import Student
from distill.distill import Distill
from export.graph.onnx import export_float
from foundation.artifacts.artifact import Artifact
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor
from foundation.training import finetune
from foundation.training.few_parameters.prompt_tuning import PromptTuning, prompted
from foundation.training.finetune import Finetune
from tests.distill.conftest import checkpoint, make_context, make_model, told  # noqa: F401 - fixtures
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

Contexts = Callable[..., Context]
TOKENS = 5
FAMILIES = ("bert", "roberta", "distilbert", "gpt2")
ROWS = ["great", "a dull movie was not good", "the film", "poor poor poor very very bad movie like the film"]


def tuned(context: Context, out: Path, **changes: Any) -> dict[str, Any]:
    out.mkdir(parents=True)
    usual: dict[str, Any] = {"prompt": {"tokens": TOKENS}, "epochs": 1, "learning_rate": 0.02, "batch_size": 16}
    stage = Finetune.model_validate({**usual, **changes})
    parent = context.baseline
    stage.check(Checkpoint(parent.path).config, None, context)
    figures = dict(stage.run(parent, context, out))
    json.dumps(figures, allow_nan=False)
    return figures


def peft_model(parent: Path, out: Path) -> Any:
    """The model of peft with the head and the virtual tokens of a checkpoint."""
    base = transformers.AutoModelForSequenceClassification.from_pretrained(parent)
    learned = load(out).state_dict()
    own = base.state_dict()
    head = {name: learned[name] for name in own if not name.startswith(base.base_model_prefix)}  # other layers may be stored transposed
    base.load_state_dict({**own, **head})
    sizes = {"num_layers": 4, "num_attention_heads": 4, "token_dim": 16}
    model = peft.get_peft_model(base, peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=TOKENS, **sizes))
    matrix = next(value for name, value in learned.items() if name.endswith(("word_embeddings.weight", "wte.weight")))
    model.prompt_encoder["default"].embedding.weight.data = matrix[-TOKENS:].clone()
    return model.eval()


def preprocessor(folder: Path, context: Context) -> Preprocessor:
    return dataclasses.replace(context, max_length=36).preprocessor(folder)


def features(folder: Path, context: Context, rows: list[str]) -> dict[str, torch.Tensor]:
    """The inputs of some texts, padded to the longest of them alone."""
    given = preprocessor(folder, context).encode(rows, 0)
    longest = int(given["attention_mask"].sum(axis=1).max())
    return {name: torch.from_numpy(value[:, :longest]) for name, value in given.items()}


@pytest.fixture(params=FAMILIES)
def family(request: Any, checkpoint: Any, make_context: Contexts) -> tuple[Path, Context]:  # noqa: F811
    folder = checkpoint(request.param)
    return folder, make_context(folder)


def test_torch_and_the_graph_compute_what_peft_computes(family: tuple[Path, Context], tmp_path: Path) -> None:
    parent, context = family
    tuned(context, tmp_path / "out")
    peers, ours = peft_model(parent, tmp_path / "out"), load(tmp_path / "out")
    expected = []
    with torch.no_grad():
        for row in ROWS:  # alone: peft's model of a decoder reads the last place, padding or not
            text, given = features(parent, context, [row]), features(tmp_path / "out", context, [row])
            assert given["input_ids"].shape[1] == text["input_ids"].shape[1] + TOKENS
            expected.append(peers(**text).logits)
            torch.testing.assert_close(ours(**given).logits, expected[-1], rtol=0, atol=2e-6)
    wanted, given = torch.cat(expected).numpy(), features(tmp_path / "out", context, ROWS)
    assert abs(wanted - wanted[:1]).max() > 0.1  # rows differ
    prepared = preprocessor(tmp_path / "out", context)
    graph = export_float(Checkpoint(tmp_path / "out"), prepared, tmp_path / "onnx" / "model.onnx")
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    answers = session.run(None, {node.name: given[node.name].numpy() for node in session.get_inputs()})[0]
    np.testing.assert_allclose(answers, wanted, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_behind_the_first_token_a_head_reads_that_token(kind: str, checkpoint: Any, make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    context = make_context(checkpoint(kind))
    tuned(context, tmp_path / "out", prompt={"tokens": TOKENS, "place": "behind_first"})
    model: Any = load(tmp_path / "out")
    matrix = model.get_input_embeddings().weight
    for row in ROWS:
        text, given = features(context.baseline.path, context, [row]), features(tmp_path / "out", context, [row])
        ids = text["input_ids"]
        states = torch.cat([matrix[ids[:, :1]], matrix[-TOKENS:][None], matrix[ids[:, 1:]]], dim=1)
        with torch.no_grad():
            expected = model(inputs_embeds=states, attention_mask=torch.ones(states.shape[:2], dtype=torch.long)).logits
            torch.testing.assert_close(model(**given).logits, expected, rtol=0, atol=2e-6)


def test_without_its_virtual_tokens_a_model_answers_otherwise(family: tuple[Path, Context], tmp_path: Path) -> None:
    _, context = family
    tuned(context, tmp_path / "out")
    model, given = load(tmp_path / "out"), features(tmp_path / "out", context, ROWS)
    with torch.no_grad():
        rest = {name: value[:, TOKENS:] for name, value in given.items()}
        assert (model(**given).logits - model(**rest).logits).abs().max() > 1e-3


@pytest.mark.parametrize("encoder", [None, "mlp", "lstm"])
def test_only_virtual_tokens_and_the_head_are_trained(encoder: str | None, make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    context = make_context()
    figures = tuned(context, tmp_path / "out", prompt={"tokens": TOKENS, "encoder": encoder}, epochs=2)
    before, after = load(context.baseline.path).state_dict(), load(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    for name, value in after.items():
        if name.endswith("word_embeddings.weight"):
            assert len(value) == len(before[name]) + TOKENS
            assert torch.equal(value[:-TOKENS], before[name])
        else:
            assert torch.equal(value, before[name]) != name.startswith("classifier"), name
    head = sum(value.numel() for name, value in before.items() if name.startswith("classifier"))
    assert figures["trained_parameters"] == head + TOKENS * 16 if encoder is None else figures["trained_parameters"] > head + TOKENS * 16


@pytest.mark.first(1)
@pytest.mark.parametrize("encoder", [None, "mlp"])
def test_a_prompt_learns(encoder: str | None, make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    figures = tuned(make_context(), tmp_path / "out", prompt={"tokens": TOKENS, "encoder": encoder}, epochs=20)
    assert figures["losses"][-1]["loss"] < 0.8 * figures["losses"][0]["loss"]


def test_training_starts_at_tokens_of_the_vocabulary(make_model: Any, checkpoint: Any, tmp_path: Path) -> None:  # noqa: F811
    model = make_model("bert")
    matrix = model.get_input_embeddings().weight.detach().clone()
    with prompted(model, PromptTuning(tokens=TOKENS), checkpoint("bert"), tmp_path, 0) as given:
        assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == given.trained
    rows = model.get_input_embeddings().weight[-TOKENS:]
    assert all(any(torch.equal(row, token) for token in matrix) for row in rows)
    assert model.config.vocab_size == len(matrix) + TOKENS
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_transformers_alone_reads_the_checkpoint(make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    context = make_context()
    tuned(context, tmp_path / "out")
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("great movie")["input_ids"]
    assert ids[:TOKENS] == list(range(20, 20 + TOKENS))
    assert ids[TOKENS:] == transformers.AutoTokenizer.from_pretrained(context.baseline.path)("great movie")["input_ids"]
    assert transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.vocab_size == 20 + TOKENS


class Killed(Exception):
    pass


def test_a_killed_run_continues_to_equal_bits(make_context: Contexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from foundation.training import supervised, train

    context = make_context()
    whole = tuned(dataclasses.replace(context, scratch=tmp_path / "a"), tmp_path / "whole", epochs=3)
    original = supervised.Supervised.__call__

    def dies(self: Any, model: Any, batch: Any) -> Any:
        if batch.step == 5:
            raise Killed
        return original(self, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(supervised.Supervised, "__call__", dies)
        patch.setattr(train.TrainConfig.model_fields["checkpoint_seconds"], "default", 0.0)
        train.TrainConfig.model_rebuild(force=True)
        with pytest.raises(Killed):
            tuned(dataclasses.replace(context, scratch=tmp_path / "b"), tmp_path / "killed", epochs=3)
    train.TrainConfig.model_rebuild(force=True)
    torch.manual_seed(99)
    resumed = tuned(dataclasses.replace(context, scratch=tmp_path / "b"), tmp_path / "resumed", epochs=3)
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (tmp_path / "resumed" / "model.safetensors").read_bytes()
    assert whole["losses"] == resumed["losses"]


def test_a_second_prompt_is_refused(make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    context = make_context()
    tuned(context, tmp_path / "first")
    (tmp_path / "second").mkdir()
    with raises_problem("prompt", "virtual tokens already"):
        Finetune(prompt=PromptTuning()).run(Artifact(tmp_path / "first", {}), context, tmp_path / "second")


@pytest.mark.parametrize("layers", [None, 2])
def test_a_student_learns_a_prompt_from_a_teacher_without_one(layers: int | None, make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    context, out = make_context(), tmp_path / "out"
    out.mkdir()
    stage = Distill(student=Student(layers=layers), prompt=PromptTuning(tokens=TOKENS), epochs=8, learning_rate=0.02, hard_weight=0)
    config = Checkpoint(context.baseline.path).config
    stage.check(config, config, context)
    figures = stage.run(context.baseline, context, out)
    assert stage.config_after(config).vocab_size == load(out).config.vocab_size == 20 + TOKENS  # type: ignore[union-attr]
    before, after = load(context.baseline.path).state_dict(), load(out).state_dict()
    changed = [name for name, value in after.items() if value.shape != before[name].shape or not torch.equal(value, before[name])]
    assert {name.rpartition(".")[0] for name in changed} == {"classifier", "bert.embeddings.word_embeddings"}
    assert context.preprocessor(out).encode(["great"], 0)["input_ids"][0, :TOKENS].tolist() == list(range(20, 20 + TOKENS))
    if layers:
        assert figures["losses"][-1]["loss"] < figures["losses"][0]["loss"]  # type: ignore[index]
    with raises_problem("distill.teacher", "tokenizes the rows differently"):
        Distill(loss="tinybert", prompt=PromptTuning(tokens=TOKENS)).run(context.baseline, context, tmp_path / "other")


def test_prompts_that_do_not_fit_are_refused(make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    context = make_context()
    config = Checkpoint(context.baseline.path).config
    with raises_problem("finetune.prompt.tokens", "9", "16", "8"):
        Finetune(prompt=PromptTuning(tokens=9)).check(config, None, context)
    with raises_problem("finetune.prompt", "data.windows"):
        Finetune(prompt=PromptTuning(tokens=2)).check(config, None, dataclasses.replace(context, aggregate="mean"))
    config.compress_architecture = {"embedding_rank": 5}
    with raises_problem("finetune.prompt", "prune.embedding_rank", "5", "before"):
        Finetune(prompt=PromptTuning(tokens=2)).check(config, None, context)
    with pytest.raises(ValidationError):
        Finetune.model_validate({"prompt": {}, "lora": {}})


def test_later_stages_know_the_larger_vocabulary(make_context: Contexts) -> None:  # noqa: F811
    config = Checkpoint(make_context().baseline.path).config
    assert Finetune(prompt=PromptTuning(tokens=TOKENS)).config_after(config).vocab_size == config.vocab_size + TOKENS
    assert finetune.Finetune().config_after(config).vocab_size == config.vocab_size
