"""Ranges and scales of attention and residuals, and the stage with both of them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError
from torch import Tensor, nn

from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.core.goals import Goals
from foundation.measure.closeness import distance
from foundation.measure.predictions import finely, predict
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward, linears
from foundation.schemes.attention_products import PROBABILITY_SCALE, attention_modules
from foundation.schemes.sites import load_sites, placed
from foundation.stage.context import Context
from quantize.calibration import threshold
from quantize.products import check_attention, observe, sites_of
from quantize.quantize import Quantize
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

SELF = "bert.encoder.layer.{}.attention.self"
RESIDUALS = [f"bert.encoder.layer.{i}.{dense}.dense/residual" for i in range(2) for dense in ("attention.output", "output")]
PRODUCTS = [f"{SELF.format(i)}/{kind}" for i in range(2) for kind in ("qk", "pv")]


def rows(bert: Artifact) -> dict[str, Tensor]:
    ids = torch.tensor([[2, 5, 6, 7, 8, 3], [2, 9, 10, 3, 0, 0], [2, 11, 3, 0, 0, 0]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def encoder(model: nn.Module) -> list[str]:
    return [name for name in linears(model) if ".encoder." in name]


def test_ranges_are_those_of_queries_keys_probabilities_values_and_residuals(bert: Artifact) -> None:
    model, features = load(bert.path), rows(bert)
    found = observe(model, encoder(model), [features, features], forward, attention=True, residual=True)
    assert [*found.products, *found.residuals] == [*PRODUCTS, *RESIDUALS]
    eager = transformers.AutoModelForSequenceClassification.from_pretrained(bert.path, attn_implementation="eager").eval()
    block, seen = eager.bert.encoder.layer[0], {}
    for name in ("query", "key", "value"):
        block.attention.self.get_submodule(name).register_forward_hook(partial(lambda name, *call: seen.update({name: call[2]}), name))
    block.attention.output.register_forward_pre_hook(lambda _, args: seen.update(residual=args[1]))
    with torch.no_grad():
        seen["probability"] = eager(**features, output_attentions=True).attentions[0].transpose(1, 2).flatten(2)
    real = features["attention_mask"].bool()
    of = {"query": found.products[PRODUCTS[0]][0], "key": found.products[PRODUCTS[0]][1], "probability": found.products[PRODUCTS[1]][0]}
    of |= {"value": found.products[PRODUCTS[1]][1], "residual": found.residuals[RESIDUALS[0]]}
    for name, histogram in of.items():
        assert histogram.largest == pytest.approx(float(seen[name][real].abs().max()), rel=1e-4), name
        assert histogram.total == 2 * seen[name][real].numel(), name


def test_padding_is_not_observed(bert: Artifact) -> None:
    model = load(bert.path)
    model.get_input_embeddings().weight.data[0] = 1000 * torch.randn(32)
    huge = observe(model, encoder(model), [rows(bert)], forward, attention=True, residual=True)
    model.get_input_embeddings().weight.data[0] = 0
    plain = observe(model, encoder(model), [rows(bert)], forward, attention=True, residual=True)
    for site in (*PRODUCTS, *RESIDUALS):
        assert [histogram.largest for histogram in huge.of(site)] == pytest.approx([histogram.largest for histogram in plain.of(site)])


def test_observing_leaves_the_model_as_it_is(bert: Artifact) -> None:
    model = load(bert.path)
    with torch.inference_mode():
        before, names = forward(model, rows(bert)), [name for name, _ in model.named_modules()]
        observe(model, encoder(model), [rows(bert)], forward, attention=True, residual=True)
        assert torch.equal(forward(model, rows(bert)), before)
    assert [name for name, _ in model.named_modules()] == names


def test_only_what_is_asked_for_is_observed(bert: Artifact) -> None:
    model = load(bert.path)
    observed = partial(observe, model, encoder(model), [rows(bert)], forward)
    assert observed(attention=True, residual=False).residuals == {}
    assert observed(attention=False, residual=True).products == {}


def test_scales_follow_the_calibrator_and_that_of_probabilities_is_fixed(bert: Artifact) -> None:
    model = load(bert.path)
    ranges = observe(model, encoder(model), [rows(bert)], forward, attention=True, residual=True)
    sites = sites_of(ranges, partial(threshold, method="minmax", percentile=99.0))
    for name, scales in sites.products.items():
        left, right = ranges.products[name]
        assert float(scales.right) == pytest.approx(right.largest / 127, rel=1e-6)
        assert float(scales.left) == pytest.approx(PROBABILITY_SCALE if name.endswith("/pv") else left.largest / 127, rel=1e-6)
    for name, scale in sites.residuals.items():
        assert float(scale) == pytest.approx(ranges.residuals[name].largest / 127, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_without_a_range_are_refused_by_name(bert: Artifact, bad: float) -> None:
    model = load(bert.path)
    model.bert.encoder.layer[1].attention.self.key.bias.data[3] = bad
    with pytest.raises(InputError, match=r"layer\.1\.attention\.self/qk.*NaN or infinite"):
        observe(model, encoder(model), [rows(bert)], forward, attention=True, residual=True)


def test_attention_that_is_not_called_through_the_registry_is_refused() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 20}
    model = transformers.AutoModelForSequenceClassification.from_config(transformers.DebertaV2Config(**sizes)).eval()
    with raises_problem("stages.quantize.attention", "DebertaV2ForSequenceClassification does not call") as refused:
        check_attention(model, {"input_ids": torch.ones(1, 3, dtype=torch.int64)}, forward, "stages.quantize.attention")
    assert len(refused.value.lines) == 1


def test_attention_that_is_more_than_the_formula_is_refused(bert: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    def capped(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **kwargs: Any) -> Any:
        scores = 0.5 * torch.tanh(query @ key.mT * scaling)
        return (torch.softmax(scores + mask, -1) @ value).transpose(1, 2), None

    model = load(bert.path)
    check_attention(model, rows(bert), forward, "key")
    model.set_attn_implementation("eager")
    monkeypatch.setattr("transformers.models.bert.modeling_bert.eager_attention_forward", capped)
    with pytest.raises(InputError, match="attention of BertForSequenceClassification is more"):
        check_attention(model, rows(bert), forward, "key")


def run(bert: Artifact, context: Context, out: Path, **settings: Any) -> dict[str, Any]:
    out.mkdir()
    figures = Quantize(id="quantize", **settings).run(bert, context, out)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    return figures


def logits(folder: Path, context: Context) -> np.ndarray:
    return predict(
        load(folder), Checkpoint(folder).preprocessor(context.task, context.max_length, context.target), context.data.evaluation.rows, 16
    )


def test_the_stage_writes_what_it_measured(bert: Artifact, context: Context, told: Any, tmp_path: Path) -> None:
    plain = run(bert, context, tmp_path / "plain")
    assert "sites" not in plain
    assert load_sites(tmp_path / "plain").names == []
    figures = run(bert, context, tmp_path / "all", attention=True, residual=True)
    assert load_sites(tmp_path / "all").names == [*PRODUCTS, *RESIDUALS]
    assert (figures["int8_products"], figures["int8_residuals"]) == ("4 of 4", "4 of 4")
    assert "  also in int8: 4 of 4 attention products, 4 of 4 residuals" in told.lines
    saved = load_sites(tmp_path / "all")
    for site in figures["sites"]:
        assert site["int8"]
        assert site["added"] is None
        assert all(0 <= tensor["clipped"] < 0.01 and tensor["sqnr_db"] > 15 and tensor["max_abs"] > 0 for tensor in site["tensors"])
    assert figures["sites"][0]["tensors"][0]["scale"] == float(saved.products[PRODUCTS[0]].left)
    assert figures["layers"] == plain["layers"]
    float_answer, without, whole = (logits(folder, context) for folder in (bert.path, tmp_path / "plain", tmp_path / "all"))
    assert 0 < np.abs(whole - without).mean() < 0.2 * float_answer.std()
    assert np.mean(whole.argmax(1) == float_answer.argmax(1)) >= 0.9


def test_the_same_run_gives_the_same_bytes(bert: Artifact, context: Context, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(bert, context, tmp_path / name, attention="auto", residual=True)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def with_a_bad_site(bert: Artifact, folder: Path) -> Artifact:
    """The model with keys and queries of the last block that int8 cannot hold: one feature of each is huge where the other is tiny."""
    model = load(bert.path)
    attention = model.bert.encoder.layer[1].attention.self
    for name, factor in (("query", 3e4), ("key", 1 / 3e4)):
        layer = attention.get_submodule(name)
        layer.weight.data[0] *= factor
        layer.bias.data[0] *= factor
    save(model, bert.path, folder, "with a bad site")
    return Artifact(folder, {})


def test_auto_leaves_a_planted_bad_site_in_float(bert: Artifact, context: Context, tmp_path: Path) -> None:
    (tmp_path / "planted").mkdir()
    planted = with_a_bad_site(bert, tmp_path / "planted")
    np.testing.assert_allclose(logits(planted.path, context), logits(bert.path, context), atol=1e-2)  # it is the same function
    bad = f"{SELF.format(1)}/qk"
    figures = run(planted, context, tmp_path / "auto", attention="auto", calibration={"method": "minmax"})
    on = {site["name"]: site["int8"] for site in figures["sites"]}
    assert not on.pop(bad)
    assert sum(on.values()) >= 2
    added = {site["name"]: site["added"] for site in figures["sites"]}
    assert max(added, key=added.__getitem__) == bad
    assert bad not in load_sites(tmp_path / "auto").names
    choice = figures["sites_choice"]
    assert choice["measure"] == "kl"
    assert choice["after"] - choice["before"] <= choice["bound"] < added[bad]
    processor = finely(Checkpoint(planted.path).preprocessor(context.task, context.max_length, context.target))
    before, after = (predict(load(folder), processor, context.data.selection.rows, 32) for folder in (planted.path, tmp_path / "auto"))
    assert choice["after"] == pytest.approx(distance(context.task, before, after), rel=1e-6)


def test_a_setting_of_true_has_no_say_in_what_it_costs(bert: Artifact, context: Context, tmp_path: Path) -> None:
    (tmp_path / "planted").mkdir()
    planted = with_a_bad_site(bert, tmp_path / "planted")
    run(planted, context, tmp_path / "all", attention=True, calibration={"method": "minmax"})
    assert load_sites(tmp_path / "all").names == PRODUCTS


def test_a_scan_shows_the_sites_among_the_layers(bert: Artifact, context: Context, tmp_path: Path) -> None:
    figures = run(bert, context, tmp_path / "out", attention=True, residual="auto", sensitivity=True)
    rows = {row["name"]: row for row in figures["sensitivity"]["layers"]}
    on = load_sites(tmp_path / "out").names
    assert set(PRODUCTS) <= set(on) <= rows.keys()
    assert len(rows) == 12 + len(on)
    added = {site["name"]: site["added"] for site in figures["sites"]}
    for name in on:
        assert rows[name]["gain"] == added[name]
        assert rows[name]["weights"] == 0
        assert rows[name]["alone"] == rows[name]["inputs"] > 0
    gains = [row["gain"] for row in figures["sensitivity"]["layers"]]
    assert gains == sorted(gains, reverse=True)


def test_images_have_sites_too(vit: Artifact, image_context: Context, tmp_path: Path) -> None:
    figures = run(vit, image_context, tmp_path / "out", attention=True, residual=True)
    assert (figures["int8_products"], figures["int8_residuals"]) == ("4 of 4", "4 of 4")
    assert len(attention_modules(load(tmp_path / "out"))) == 2


def test_a_trained_model_gets_its_sites_after_the_training(bert: Artifact, context: Context, tmp_path: Path) -> None:
    figures = run(bert, context, tmp_path / "out", mode="qat", attention=True, residual="auto", qat={"epochs": 0.2, "distill": False})
    saved = load_sites(tmp_path / "out")
    assert list(saved.products) == PRODUCTS
    model = load(tmp_path / "out")
    with torch.inference_mode():
        assert torch.isfinite(forward(model, rows(bert))).all()
    assert figures["sites_choice"]["after"] >= 0


def test_the_ladder_judges_what_it_keeps(bert: Artifact, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import quantize.escalation

    seen = []

    def spy(model: nn.Module, attention: Any, residuals: Any) -> Any:
        seen.append((sorted(attention), sorted(residuals)))
        return placed(model, attention, residuals)

    monkeypatch.setattr(quantize.escalation, "placed", spy)
    run(bert, replace(context, goals=Goals(max_drop=1.0)), tmp_path / "out", mode="auto", attention=True)
    assert seen == [([SELF.format(0), SELF.format(1)], [])]
    assert load_sites(tmp_path / "out").names == PRODUCTS


def test_no_residual_behind_an_int8_layer_is_an_error(bert: Artifact, context: Context, tmp_path: Path) -> None:
    with raises_problem("stages.quantize.residual", "no addition", "int8 linear layer"):
        run(bert, context, tmp_path / "out", residual=True, exclude=("*.output.dense",))


@pytest.mark.parametrize("settings", [{"attention": "always"}, {"residual": 0.5}, {"attention": True, "scheme": "w8a8-dynamic"}])
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Quantize(id="quantize", **settings)
