"""The stage `adapters`: what each learns, that the model below stays, that merged models answer alike, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.recipe import check
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.classes import ClassIds
from foundation.measure.predictions import compared
from foundation.models.adapter_files import adapter_names, read_adapters
from foundation.models.checkpoint import load, load_float
from foundation.models.folder import Checkpoint
from foundation.models.layers.adapter_stack import merge, stacks
from foundation.stage.context import Context
from foundation.standalone.adapted import adapter_of, with_adapter
from foundation.training.few_parameters.adapter_training import changed_heads, changes_of, heads_of, only_trainable
from foundation.training.few_parameters.adapters import Adapters, for_adapter, trained_names
from foundation.training.few_parameters.lora import Lora, attached
from tests.distill.conftest import checkpoint, make_context, make_model, told  # noqa: F401 - fixtures
from tests.export import sentiment
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

Contexts = Callable[..., Context]
NAMES = ("same", "turned")
TARGET = Target(engines=("openvino", "onnxruntime"), sequence_lengths=(8,))


def with_names(split: Split, names: tuple[str, ...] = NAMES) -> Split:
    """Every row for each of the names; a name has one answer to all of them, so that no model answers both without its adapter."""
    rows = [with_adapter(row, name) for name in names for row in split.rows]
    return Split(rows, ClassIds(np.array([int(adapter_of(row) == "turned") for row in rows], np.int64)))


def named(context: Context, names: tuple[str, ...] = NAMES, **changes: Any) -> Context:
    own = context.data
    data = Data(with_names(own.train, names), with_names(own.selection, names), with_names(own.evaluation, names), own.labels)
    return dataclasses.replace(context, data=data, target=TARGET, **changes)


def trained(context: Context, out: Path, **changes: Any) -> dict[str, Any]:
    out.mkdir(parents=True)
    usual: dict[str, Any] = {"lora": {"rank": 4, "alpha": 16}, "epochs": 4, "learning_rate": 0.05, "batch_size": 16}
    stage = Adapters.model_validate({**usual, **changes})
    stage.check(Checkpoint(context.baseline.path).config, None, context)
    figures = dict(stage.run(context.baseline, context, out))
    json.dumps(figures, allow_nan=False)
    return figures


@pytest.fixture(params=["bert", "distilbert", "roberta", "int8"])
def family(request: Any, checkpoint: Any, make_context: Contexts) -> Context:  # noqa: F811
    folder = sentiment.quantized(8) if request.param == "int8" else checkpoint(request.param)
    return named(make_context(folder))


def right(logits: Any, split: Split) -> float:
    return float((logits.argmax(axis=1) == split.labels.array).mean())


def test_each_adapter_learns_its_rows_and_the_model_stays(family: Context, tmp_path: Path) -> None:
    parent, out = family.baseline.path, tmp_path / "out"
    figures = trained(family, out)
    assert adapter_names(out) == NAMES
    for file in parent.iterdir():
        if file.name != "README.md":
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    prepared = family.preprocessor(out)
    split = family.data.selection
    answers = compared(load(out), prepared, split.rows, 7)  # batches that mix both
    plain = compared(load(parent), family.preprocessor(parent), split.rows, 7)
    assert right(answers, split) > right(plain, split) + 0.2
    assert all(change.weight().abs().max() > 1e-4 for adapter in read_adapters(out).values() for change in adapter.values())
    for name, adapter in read_adapters(out).items():
        own = for_adapter(family, name).data.selection
        merged = load_float(parent)
        merge(merged, adapter)
        expected = compared(merged, family.preprocessor(parent), own.rows, 9)
        np.testing.assert_allclose(compared(load_float(out), prepared, own.rows, 9), expected, rtol=1e-4, atol=1e-4)
        assert figures["adapters"][name]["difference"] < 5e-4  # of logits of about 6; sums are rounded otherwise on every processor
        assert figures["adapters"][name]["rows"] == len(for_adapter(family, name).data.train)
        same = [adapter_of(row) == name for row in split.rows]
        if not Checkpoint(parent).is_quantized:
            np.testing.assert_allclose(answers[same], compared(load(out), prepared, own.rows, 9), atol=1e-4)


def test_int8_layers_keep_their_integers(make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    context = named(make_context(sentiment.quantized(8)))
    trained(context, tmp_path / "out", epochs=1)
    before, after = load(context.baseline.path).state_dict(), load(tmp_path / "out").state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    added = {name for name in after if name not in before}
    assert added
    assert all(".adapters." in name for name in added)


def test_an_adapter_depends_on_its_own_rows_alone(make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    whole, one = named(make_context()), named(make_context(), NAMES[:1])
    trained(whole, tmp_path / "both", epochs=2)
    trained(dataclasses.replace(one, scratch=tmp_path / "elsewhere"), tmp_path / "one", epochs=2)
    for layer, change in read_adapters(tmp_path / "one")["same"].items():
        other = read_adapters(tmp_path / "both")["same"][layer]
        assert torch.equal(change.down, other.down)
        assert torch.equal(change.up, other.up)


def test_chosen_layers_get_adapters_and_the_plain_model_has_a_name(make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    context = named(make_context())
    figures = trained(context, tmp_path / "out", base="plain", lora={"rank": 1, "alpha": 2, "layers": ["*.query"]}, epochs=1)
    model = load(tmp_path / "out")
    blocks = [name for name in stacks(model) if name != "classifier"]
    assert blocks
    assert all(name.endswith(".query") and stacks(model)[name].rank == 2 for name in blocks)
    assert adapter_names(tmp_path / "out") == (*NAMES, "plain")
    assert figures["base"] == "plain"
    rows = [with_adapter(str(row), "plain") for row in context.data.selection.rows]
    parent = context.baseline.path
    expected = compared(load(parent), context.preprocessor(parent), rows, 5)
    np.testing.assert_allclose(compared(model, context.preprocessor(tmp_path / "out"), rows, 5), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "key", "parts"),
    [
        ({"base": "turned"}, "adapters.base", ("turned", "another name")),
        ({"lora": {"layers": ["*.nothing"]}}, "lora.layers", ("*.nothing",)),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    changes: dict[str, Any],
    key: str,
    parts: tuple[str, ...],
    make_context: Contexts,  # noqa: F811
    tmp_path: Path,
) -> None:
    with raises_problem(key, *parts):
        trained(named(make_context()), tmp_path / "out", **changes)


def test_rows_and_targets_that_do_not_fit_are_refused(make_context: Contexts, tmp_path: Path) -> None:  # noqa: F811
    context = make_context()
    with raises_problem("adapters", "data.columns.adapter"):
        trained(dataclasses.replace(context, target=TARGET), tmp_path / "a")
    whole = named(context)
    strange = dataclasses.replace(whole.data, evaluation=with_names(context.data.evaluation, ("same", "Turned")))
    with raises_problem("data.columns.adapter", "evaluation", "Turned", "same", "turned"):
        trained(dataclasses.replace(whole, data=strange), tmp_path / "b")
    assert trained_names(whole.data) == ["same", "turned"]
    offered = dataclasses.replace(whole.data, evaluation=with_names(context.data.evaluation, ("same", "plain")))
    Adapters(base="plain").check(Checkpoint(whole.baseline.path).config, None, dataclasses.replace(whole, data=offered))
    with raises_problem("target.engines", "tensorrt"):
        trained(dataclasses.replace(whole, target=Target(engines=("tensorrt",), sequence_lengths=(8,))), tmp_path / "c")
    with raises_problem("adapters", "data.windows"):
        trained(dataclasses.replace(whole, aggregate="mean"), tmp_path / "d")


def recipe(stages: list[dict[str, Any]], **columns: str) -> Any:
    data = {"path": "reviews", "columns": {"text": "text", "label": "label", **columns}}
    return check({"name": "tiny", "model": {"path": "m", "task": "text-classification"}, "data": data, "stages": stages})


@pytest.mark.parametrize(
    ("stages", "key", "parts"),
    [
        ([{"adapters": {}}, {"quantize": {}}], "stages.quantize", ("adapters",)),
        ([{"adapters": {}}, {"adapters": {"id": "more"}}], "stages.more", ("adapters",)),
        ([{"quantize": {"residual": True}}, {"adapters": {}}], "quantize.residual", ("residual", "false")),
        ([{"adapters": {}}, {"export": {"tensor_parallel": 2}}], "export.tensor_parallel", ("adapters",)),
        ([{"quantize": {}}], "data.columns.adapter", ("adapters",)),
    ],
)
def test_stages_that_do_not_go_together_are_refused(stages: list[dict[str, Any]], key: str, parts: tuple[str, ...]) -> None:
    with raises_problem(key, *parts):
        recipe(stages, adapter="shop")


def test_a_recipe_without_adapters_keeps_its_cache_keys() -> None:
    assert "adapter" not in recipe([{"quantize": {}}]).data.columns.model_dump()


def test_changes_are_what_peft_computes(make_context: Contexts) -> None:  # noqa: F811
    context = make_context()
    model, plain = load_float(context.baseline.path), load_float(context.baseline.path)
    heads = heads_of(model)
    attached(model, Lora(rank=3, alpha=5), "test")
    only_trainable(model, heads)
    before = {name: [one.detach().clone() for one in layer.parameters()] for name, layer in heads.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape))
    rows, prepared = context.data.selection.rows, context.preprocessor(context.baseline.path)
    expected = compared(model, prepared, rows, 8)
    merge(plain, {**changes_of(model), **changed_heads(heads, before)})
    np.testing.assert_allclose(compared(plain, prepared, rows, 8), expected, rtol=1e-4, atol=1e-4)
