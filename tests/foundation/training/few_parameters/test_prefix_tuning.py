"""Prefix tuning and P-tuning v2: what is trained, that the result computes what peft's model computes, and what is refused."""

from __future__ import annotations

import dataclasses
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
from foundation.core.errors import InputError
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.models.own_shape import prefix_of
from foundation.stage.context import Context
from foundation.training.few_parameters.prefix_network import PrefixNetwork
from foundation.training.few_parameters.prefix_tuning import PrefixTuning, prefixed
from foundation.training.finetune import Finetune
from tests.distill.conftest import checkpoint, make_context, make_model, told  # noqa: F401 - fixtures
from tests.foundation.training.few_parameters.test_prompt_tuning import ROWS, features, preprocessor
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

Contexts = Callable[..., Context]
TOKENS = 5


def tuned(context: Context, out: Path, **changes: Any) -> dict[str, Any]:
    out.mkdir(parents=True)
    usual: dict[str, Any] = {"prefix": {"tokens": TOKENS}, "epochs": 1, "learning_rate": 0.02, "batch_size": 16}
    stage = Finetune.model_validate({**usual, **changes})
    parent = context.baseline
    config = Checkpoint(parent.path).config
    stage.check(config, None, context)
    figures = dict(stage.run(parent, context, out))
    assert prefix_of(stage.config_after(config)) == prefix_of(Checkpoint(out).config) == TOKENS
    return figures


def learned(model: torch.nn.Module) -> list[str]:
    return [name for name in model.state_dict() if ".prefix." in name]


def drawn(model: Any) -> Any:
    """Gives keys and values that move the logits, in place."""
    generator = torch.Generator().manual_seed(3)
    for name in learned(model):
        model.get_parameter(name).data.normal_(generator=generator)
    return model


def peft_model(parent: Path, ours: Any) -> Any:
    """The model of peft with the head and the prefix of ours."""
    base = transformers.AutoModelForSequenceClassification.from_pretrained(parent)
    head = {name: value for name, value in ours.state_dict().items() if not name.startswith(f"{base.base_model_prefix}.")}
    base.load_state_dict({**base.state_dict(), **head})
    sizes = {"num_layers": 4, "num_attention_heads": 4, "token_dim": 16}
    model = peft.get_peft_model(base, peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=TOKENS, **sizes))
    weights = torch.cat([ours.get_parameter(name) for name in learned(ours)], dim=1)
    model.prompt_encoder["default"].embedding.weight.data = weights.detach().clone()
    return model.eval()


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2"])
def test_with_its_positions_it_computes_what_peft_computes(kind: str, checkpoint: Any, make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    parent = checkpoint(kind)
    context = make_context(parent)
    tuned(context, tmp_path / "out")
    ours: Any = drawn(load(tmp_path / "out"))
    theirs = peft_model(parent, ours)
    for row in ROWS:  # alone: peft's model of a decoder reads the last place, padding or not
        given = features(parent, context, [row])
        first = TOKENS + (1 if kind == "roberta" else 0)  # its positions begin behind the number of its padding
        moved = torch.arange(first, first + given["input_ids"].shape[1])[None]
        with torch.no_grad():
            expected = theirs(**given).logits
            # the processor decides how float32 is rounded
            torch.testing.assert_close(ours(**given, position_ids=moved).logits, expected, rtol=0, atol=1e-5)
            assert (ours(**given).logits - expected).abs().max() > 1e-4  # tokens keep their positions here


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "gpt2"])
def test_the_graph_computes_what_torch_computes(kind: str, checkpoint: Any, make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    context = make_context(checkpoint(kind))
    tuned(context, tmp_path / "tuned")
    model: Any = load(tmp_path / "tuned")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)  # as large as trained weights are: with larger ones a GELU of float32 alone is further apart
    (tmp_path / "out").mkdir()
    save(drawn(model), tmp_path / "tuned", tmp_path / "out", "Drawn")
    given = features(tmp_path / "out", context, ROWS)
    with torch.no_grad():
        wanted = model(**given).logits.numpy()
        for name in learned(model):
            model.get_parameter(name).zero_()
        assert np.abs(model(**given).logits.numpy() - wanted).max() > 1e-3
    prepared = preprocessor(tmp_path / "out", context)
    graph = export_float(Checkpoint(tmp_path / "out"), prepared, tmp_path / "onnx" / "model.onnx")
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    answers = session.run(None, {node.name: given[node.name].numpy() for node in session.get_inputs()})[0]
    np.testing.assert_allclose(answers, wanted, rtol=0, atol=1e-5)


def test_the_network_is_that_of_peft() -> None:
    config = peft.PrefixTuningConfig(
        task_type="SEQ_CLS",
        num_virtual_tokens=TOKENS,
        num_layers=2,
        num_attention_heads=2,
        token_dim=8,
        encoder_hidden_size=12,
        prefix_projection=True,
    )
    theirs: Any = peft.PrefixEncoder(config)
    ours = PrefixNetwork(TOKENS, 8, 12, [8, 8])
    ours.load_state_dict(theirs.state_dict())
    expected = theirs(torch.arange(TOKENS)[None])[0]
    torch.testing.assert_close(torch.cat([part for layer in range(2) for part in ours(layer)], dim=1), expected)


def test_layers_of_other_widths_have_slices_of_their_own() -> None:
    network = PrefixNetwork(TOKENS, 8, 6, [4, 8])
    inner, tanh, outer = network.transform
    whole = outer(tanh(inner(network.embedding.weight)))
    parts = [part for layer in range(2) for part in network(layer)]
    assert [part.shape[1] for part in parts] == [4, 4, 8, 8]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("encoder", [None, "mlp"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_only_the_prefix_and_the_head_are_trained(
    encoder: str | None,
    kind: str,
    checkpoint: Any,  # noqa: F811
    make_context: Contexts,  # noqa: F811
    tmp_path: Path,
) -> None:
    context = make_context(checkpoint(kind))
    figures = tuned(context, tmp_path / "out", prefix={"tokens": TOKENS, "encoder": encoder, "hidden": 7 if encoder else None})
    before, after = load(context.baseline.path), load(tmp_path / "out")
    own = before.state_dict()
    head = sum(value.numel() for name, value in own.items() if name.startswith(("classifier", "score")))
    for name, value in after.state_dict().items():
        if ".prefix." not in name:
            assert torch.equal(value, own[name]) != name.startswith(("classifier", "score")), name
    assert len(learned(after)) == 8
    assert sum(after.get_parameter(name).numel() for name in learned(after)) == 4 * 2 * TOKENS * 16
    of_network = TOKENS * 16 + (16 + 1) * 7 + (7 + 1) * 4 * 2 * 16
    assert figures["trained_parameters"] == head + (of_network if encoder else 4 * 2 * TOKENS * 16)


def test_gradients_reach_nothing_else(make_model: Any) -> None:  # noqa: F811
    model = make_model("bert")
    with prefixed(model, PrefixTuning(tokens=TOKENS), 0, "finetune.prefix") as trained:
        model(input_ids=torch.tensor([[2, 7, 3]])).logits.square().sum().backward()
        reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        assert reached == {*learned(model), *(name for name in model.state_dict() if name.startswith("classifier"))}
        assert all(model.get_parameter(name).grad.abs().max() > 0 for name in reached)
        assert sum(model.get_parameter(name).numel() for name in reached) == trained
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("encoder", [None, "mlp"])
def test_a_prefix_learns(encoder: str | None, make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    figures = tuned(make_context(), tmp_path / "out", prefix={"tokens": TOKENS, "encoder": encoder}, epochs=20)
    assert figures["losses"][-1]["loss"] < 0.8 * figures["losses"][0]["loss"]


def test_the_checkpoint_is_what_was_trained(make_model: Any, make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    context, given = (
        make_context(),
        {"input_ids": torch.tensor([[2, 7, 8, 3], [2, 9, 3, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])},
    )
    model = load(context.baseline.path)
    with prefixed(model, PrefixTuning(tokens=TOKENS, encoder="mlp"), 0, "finetune.prefix"), torch.no_grad():
        for parameter in model.get_submodule("prefix_network").parameters():
            parameter.mul_(2)
        within = model(**given).logits
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, within)
        save(model, context.baseline.path, tmp_path, "Tuned")
        torch.testing.assert_close(load(tmp_path)(**given).logits, within)
    with pytest.raises(ValueError, match=r"compress\.api\.load_checkpoint"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_a_student_learns_a_prefix_from_a_teacher_without_one(make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    context, out = make_context(), tmp_path / "out"
    out.mkdir()
    stage = Distill(student=Student(layers=2), prefix=PrefixTuning(tokens=TOKENS), epochs=8, learning_rate=0.02, hard_weight=0)
    config = Checkpoint(context.baseline.path).config
    stage.check(config, config, context)
    figures: Any = stage.run(context.baseline, context, out)
    assert len(learned(load(out))) == 4
    assert figures["losses"][-1]["loss"] < figures["losses"][0]["loss"]


def test_a_prefix_that_does_not_fit_is_refused(make_context: Contexts, checkpoint: Any, tmp_path: Path) -> None:  # noqa: F811
    context = make_context()
    config = Checkpoint(context.baseline.path).config
    with raises_problem("finetune.prefix.hidden", "8 given", "encoder: mlp"):
        Finetune(prefix=PrefixTuning(hidden=8)).check(config, None, context)
    for task in ("text-generation", "image-classification"):
        with raises_problem("finetune.prefix", f"given for {task}", "do not write"):
            from foundation.training.few_parameters.prefix_tuning import check_prefix

            check_prefix(PrefixTuning(), config, dataclasses.replace(context, task=task), "finetune.prefix")
    for both in ({"prefix": {}, "lora": {}}, {"prefix": {}, "prompt": {}}):
        with pytest.raises(ValidationError, match="prefix: given with"):
            Finetune.model_validate(both)
        with pytest.raises(ValidationError, match="given with"):
            Distill.model_validate(both)
    tuned(context, tmp_path / "first")
    with raises_problem("finetune.prefix", "prefix already"):
        Finetune(prefix=PrefixTuning()).check(Checkpoint(tmp_path / "first").config, None, context)


def test_attention_of_its_own_is_refused(make_context: Contexts) -> None:  # noqa: F811
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    config = transformers.AutoConfig.for_model("mpnet", vocab_size=20, architectures=["MPNetForSequenceClassification"], **sizes)
    with raises_problem("finetune.prefix", "this mpnet attends by code of its own"):
        Finetune(prefix=PrefixTuning()).check(config, None, make_context())


def test_a_loss_of_attention_is_refused(make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    context = make_context()
    tuned(context, tmp_path / "out")
    config = Checkpoint(tmp_path / "out").config
    for loss in ("minilm", "minilmv2", "tinybert"):
        with pytest.raises(InputError, match="the attention of the student reads a learned prefix too: give soft_target"):
            Distill(loss=loss).check(config, config, context)
    for loss in ("soft_target", "pkd"):
        Distill(loss=loss).check(config, config, context)
