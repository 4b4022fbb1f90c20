"""The stage on tiny checkpoints: every method in every pattern, what it writes, what a kill costs, and what later stages keep of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from compress.problems import explain
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from foundation.training.finetune import Finetune
from foundation.training.kept_zeros import NOTE
from foundation.training.train import Batch
from prune.prune import Prune
from prune.sparsify.settings import LassoSettings
from prune.sparsify.sparsify import NO_SPEED, TWO_FOUR, Sparsify
from prune.sparsify.target_layers import target_layers, warn_of_dense_weights
from quantize.quantize import Quantize
from tests.foundation import tiny_gpt
from tests.problems import raises_problem
from tests.prune.conftest import context_of
from tests.told import Told

pytestmark = pytest.mark.whole

TRAINED: dict[str, Any] = {"epochs": 1, "learning_rate": 3e-3}
QUICK: dict[str, Any] = {"rows": 16, "recover": None, "learning": TRAINED}
BLOCK = {"block": [4, 8]}


def artifact(folder: Path, name: str = "baseline") -> Artifact:
    return Artifact(folder, {"id": name, "stage": "model", "digest": "0" * 64})


def made(stage: Any, folder: Path, context: Context, out: Path) -> tuple[Any, dict[str, Any]]:
    out.mkdir()
    config = Checkpoint(folder).config
    stage.check(config, config, context)
    figures = stage.run(artifact(folder), context, out)
    return load(out), figures


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: module.weight.detach() for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def zeros(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight == 0 for name, weight in weights(model).items() if bool((weight == 0).any())}


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"method": "magnitude", "sparsity": 0.3}, 0.3),
        pytest.param({"method": "magnitude", "pattern": BLOCK}, 0.5, marks=pytest.mark.slow),
        pytest.param({"method": "wanda", "sparsity": 0.75}, 0.75, marks=pytest.mark.slow),
        ({"method": "wanda", "pattern": "2:4"}, 0.5),
        pytest.param({"method": "wanda", "pattern": BLOCK}, 0.5, marks=pytest.mark.slow),
        pytest.param({"method": "sparsegpt", "sparsity": 0.6}, 0.6, marks=pytest.mark.slow),
        pytest.param({"method": "sparsegpt", "pattern": "1:4"}, 0.75, marks=pytest.mark.slow),
        ({"method": "sparsegpt", "pattern": BLOCK}, 0.5),
        pytest.param({"method": "movement", "sparsity": 0.8}, 0.8, marks=pytest.mark.slow),
        ({"method": "movement", "pattern": BLOCK}, 0.5),
        ({"method": "lasso", "pattern": BLOCK, "lasso": {"threshold": "layer"}}, 0.5),
        pytest.param({"method": "lasso", "pattern": BLOCK, "lasso": {"metric": "weights"}}, 0.5, marks=pytest.mark.slow),
        pytest.param({"method": "lasso", "pattern": BLOCK, "lasso": {"groups": "both", "threshold": "layer"}}, 0.5, marks=pytest.mark.slow),
        ({"method": "lasso", "pattern": BLOCK, "lasso": {"groups": "columns", "threshold": "balanced"}}, 0.5),
    ],
    ids=str,
)
def test_every_layer_gets_its_share_of_zeros(
    settings: dict[str, Any],
    share: float,
    checkpoint: Callable[..., Path],
    make_context: Callable[..., Context],
    tmp_path: Path,
    told: Told,
) -> None:
    folder = checkpoint("bert")
    model, figures = made(Sparsify(**{**QUICK, **settings}), folder, make_context(), tmp_path / "out")
    assert len(figures["layers"]) == 3 * 6
    assert figures["asked"] == share
    for row in figures["layers"]:
        weight = weights(model)[row["name"]]
        assert row["zeros"] == int((weight == 0).sum())
        assert share - 4 / weight.numel() <= row["sparsity"] == row["zeros"] / weight.numel() < share + 0.07  # to half a group of 8
        assert row["outputs"] == sum(not bool(line.any()) for line in weight)
        assert row["inputs"] == sum(not bool(line.any()) for line in weight.T)
        if ":" in str(settings.get("pattern")) and isinstance(settings["pattern"], str):
            assert int((weight.reshape(-1, 4) != 0).sum(dim=1).max()) == int(settings["pattern"][0])
        if settings.get("pattern") == BLOCK:
            empty = [not bool(part.any()) for strip in weight.split(4) for part in strip.split(8, dim=1)]
            assert (row["blocks"], row["zero_blocks"]) == (len(empty), sum(empty))
    assert figures["sparsity"] == sum(row["zeros"] for row in figures["layers"]) / sum(row["weights"] for row in figures["layers"])
    assert zeros(model).keys() == {row["name"] for row in figures["layers"]}
    assert figures["speed"] == (TWO_FOUR if settings.get("pattern") == "2:4" else NO_SPEED)
    assert figures["speed"] in told.lines[-1]
    assert figures["speed"] in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "config.json").read_text())[NOTE] is True
    assert ("learning" in figures) == (settings["method"] in ("movement", "lasso"))
    json.dumps(figures, allow_nan=False)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "vit", "distilbert"])
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_other_kinds_of_models(
    kind: str, method: str, make_model: Callable[..., Any], make_features: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, model = Sparsify(method=method, pattern="2:4"), make_model(kind)  # type: ignore[arg-type]
    batches = [Batch(make_features(kind, rows=4, seed=seed), torch.zeros(4), np.arange(4), 0, 1) for seed in range(2)]
    monkeypatch.setattr("prune.calibration.calibration_batches", lambda *args: batches)
    figures = stage._in_one_go(model, Path(), Context("text-classification", None, 16, Target(), 0, Told(), Path()), None)  # type: ignore[arg-type]
    assert figures == {"unreached": []}
    for layer in target_layers(stage, model).values():
        groups = torch.nn.functional.pad(layer.weight, (0, -layer.in_features % 4)).reshape(-1, 4)
        assert int((groups != 0).sum(dim=1).max()) <= 2
    assert not any(name.startswith(("score", "classifier", "lm_head")) for name in zeros(model))


def test_a_language_model_whose_weights_are_stored_the_other_way_round(tmp_path: Path, told: Told) -> None:
    folder = tiny_gpt.checkpoint("gpt2")
    context = Context("text-generation", tiny_gpt.data(), tiny_gpt.LENGTH, Target(sequence_lengths=(8,)), 0, told, tmp_path / "scratch")
    context = replace(context, checkpoints={"baseline": artifact(folder)}, teachers=(artifact(folder),))
    stage = Sparsify(pattern="2:4", rows=16, recover={"epochs": 0.2, "learning_rate": 1e-3})  # type: ignore[arg-type]
    model, figures = made(stage, folder, context, tmp_path / "out")
    assert figures["sparsity"] == 0.5
    assert all(int((weight.reshape(-1, 4) != 0).sum(dim=1).max()) == 2 for name, weight in weights(model).items() if name in zeros(model))


def test_excluded_layers_have_no_zeros(checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> None:
    stage = Sparsify(**{**QUICK, "method": "magnitude", "exclude": ("*.layer.1.*", "*.query")})
    model, figures = made(stage, checkpoint("bert"), make_context(), tmp_path / "out")
    assert len(figures["layers"]) == 2 * 5
    assert not any(".layer.1." in name or name.endswith("query") for name in zeros(model))


def test_training_is_told_and_leaves_zeros_where_they_are(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    folder, context = checkpoint("bert"), make_context()
    bare, _ = made(Sparsify(**{**QUICK, "method": "wanda"}), folder, replace(context, scratch=tmp_path / "bare"), tmp_path / "plain")
    stage = Sparsify(**{**QUICK, "method": "wanda", "recover": {**TRAINED, "epochs": 2, "hidden_weight": 0.1}})
    model, figures = made(stage, folder, context, tmp_path / "out")
    assert {"cross_entropy", "teacher", "hidden"} <= figures["recovery"]["losses"][0].keys()
    assert zeros(model).keys() == zeros(bare).keys()
    for name, where in zeros(bare).items():
        assert torch.equal(zeros(model)[name], where)
        assert not torch.equal(weights(model)[name], weights(bare)[name])


@pytest.mark.first(1)
@pytest.mark.parametrize("method", ["movement", "lasso"])
def test_the_losses_of_learning_are_kept(
    method: str, checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    stage = Sparsify(**{**QUICK, "method": method, "pattern": BLOCK, "learning": {"epochs": 6, "learning_rate": 1e-2}})
    _, figures = made(stage, checkpoint("bert"), make_context(), tmp_path / "out")
    losses = figures["learning"]["losses"]
    assert len(losses) == 6
    assert losses[-1]["cross_entropy"] < losses[0]["cross_entropy"]
    if method == "lasso":
        groups = figures["groups"]
        assert groups["metric"] == "curvature"
        name = figures["layers"][2]["name"]
        assert groups["after"][name][1] < 0.1 * groups["before"][name][1]  # the small ones have become next to nothing


def test_in_the_metric_of_the_loss_layers_differ_in_sparsity(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    stage = Sparsify(**{**QUICK, "method": "lasso", "pattern": BLOCK, "sparsity": 0.6})
    _, figures = made(stage, checkpoint("bert"), make_context(), tmp_path / "out")
    shares = [row["sparsity"] for row in figures["layers"]]
    assert figures["sparsity"] == pytest.approx(0.6, abs=0.01)
    assert max(shares) - min(shares) > 0.1
    kinds = {"metric": "weights"}, {"threshold": "balanced"}, {"metric": "weights", "threshold": "model"}, {}
    assert [LassoSettings(**kind).ranking for kind in kinds] == ["layer", "balanced", "model", "model"]  # type: ignore[arg-type]


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("settings", "dies_at"),  # while zeros are learned, and while the rest is trained
    [
        pytest.param({"method": "movement"}, 3, marks=pytest.mark.slow),
        ({"method": "movement"}, 7),
        ({"method": "lasso", "pattern": BLOCK, "lasso": {"reweight": 0.5}}, 3),
        pytest.param({"method": "lasso", "pattern": BLOCK, "lasso": {"reweight": 0.5}}, 7, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_kill_costs_no_bit(
    settings: dict[str, Any],
    dies_at: int,
    checkpoint: Callable[..., Path],
    make_context: Callable[..., Context],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: Told,
) -> None:
    from foundation.training import train

    config = train.TrainConfig.of
    monkeypatch.setattr(train.TrainConfig, "of", lambda given, **changes: config(given, **{**changes, "checkpoint_seconds": 0}))
    context, folder = make_context(), checkpoint("bert")
    trained = {**TRAINED, "batch_size": 12}  # four steps in each of the two trainings
    stage = Sparsify(**{**QUICK, **settings, "learning": trained, "recover": trained})
    whole, figures = made(stage, folder, replace(context, scratch=tmp_path / "whole"), tmp_path / "out")
    assert (figures["learning"]["steps"], figures["recovery"]["steps"]) == (4, 4)
    killed, write, writes = replace(context, scratch=tmp_path / "killed"), train.write_state, []

    def dies(*args: Any) -> None:
        write(*args)
        writes.append(args)
        if len(writes) == dies_at:
            raise Killed

    monkeypatch.setattr(train, "write_state", dies)
    with pytest.raises(Killed):
        made(stage, folder, killed, tmp_path / "first")
    resumed, again = made(stage, folder, killed, tmp_path / "second")
    assert len(writes) == 8
    assert ("  sparsify: the zeros are already chosen" in told.lines) == (dies_at > 4)
    assert again == figures
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())


def test_whole_heads_and_neurons_are_found(checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> None:
    from foundation.models.checkpoint import save

    model: Any = load(checkpoint("bert"))
    layer = model.bert.encoder.layer[1]
    with torch.no_grad():
        layer.attention.output.dense.weight[:, [4, 5, 6, 7, 12]] = 0  # a head, and a quarter of another
        layer.output.dense.weight[:, [2, 3, 9]] = 0
        layer.attention.self.value.weight[5] = 0
    folder = tmp_path / "emptied"
    folder.mkdir()
    save(model, checkpoint("bert"), folder, "emptied")
    context = make_context()
    _, figures = made(Sparsify(**{**QUICK, "method": "magnitude", "sparsity": 0}), folder, context, tmp_path / "out")
    assert figures["unread"] == {"heads": 1, "neurons": 3}
    rows = {row["name"]: row for row in figures["layers"]}
    assert rows["bert.encoder.layer.1.attention.output.dense"]["inputs"] == 5
    assert rows["bert.encoder.layer.1.attention.self.value"]["outputs"] == 1


@pytest.fixture(scope="module")
def sparse(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint with two zeros in four."""
    folder, out = checkpoint("bert"), tmp_path_factory.mktemp("sparse")
    made(Sparsify(**{**QUICK, "pattern": "2:4"}), folder, context_of(folder, out / "scratch", Told()), out / "sparse")
    return out / "sparse"


@pytest.mark.parametrize("second", [{"sparsity": 0.75}, {"pattern": "1:4"}, {"method": "wanda", "sparsity": 0.75}], ids=str)
def test_a_second_time_leaves_the_zeros_of_the_first(
    second: dict[str, Any], sparse: Path, make_context: Callable[..., Context], tmp_path: Path
) -> None:
    first = load(sparse)
    model, figures = made(Sparsify(**{**QUICK, **second}), sparse, make_context(), tmp_path / "second")
    assert figures["sparsity"] == pytest.approx(0.75, abs=0.01)
    for name, where in zeros(first).items():
        assert bool(zeros(model)[name][where].all())
        assert int((weights(model)[name].reshape(-1, 4) != 0).sum(dim=1).max()) <= 2


def test_what_gets_no_zeros_or_no_whole_pattern_is_said(
    make_model: Callable[..., Any], make_context: Callable[..., Context], told: Told
) -> None:
    stage, model, context = Sparsify(pattern="2:5"), make_model("mixtral"), make_context()
    layers = target_layers(stage, model)
    warn_of_dense_weights(stage, model, layers, context.progress)
    stacked, ragged = told.warnings
    assert re.search(r"^sparsify: 6 stacked expert weights in 3 blocks stay dense, first model.layers.0", stacked)
    assert re.search(rf"^sparsify: {len(layers)} layers have a number of inputs that is not a multiple of 5, first \S+ \(24\): ", ragged)
    told.warnings.clear()
    bert, fitting = make_model("bert"), Sparsify(pattern="2:4")
    warn_of_dense_weights(fitting, bert, target_layers(fitting, bert), context.progress)
    assert told.warnings == []


@pytest.mark.parametrize(
    "stage",
    [
        Finetune(epochs=1, learning_rate=3e-3),
        Quantize(mode="qat", qat=TRAINED, calibration={"rows": 16}, weight_bits=8),
        pytest.param(Quantize(calibration={"rows": 16}, weight_bits=8), marks=pytest.mark.slow),
        Quantize(calibration={"rows": 16}, weight_bits=8, equalization=True, bias_correction=True, rounding="gptq"),
        Quantize(calibration={"rows": 16}, scheme="w4a16", group_size=16, awq=True, rounding="gptq"),
        pytest.param(Quantize(calibration={"rows": 16}, scheme="fp8"), marks=pytest.mark.slow),
    ],
    ids=["finetune", "qat", "ptq", "gptq", "awq", "fp8"],
)
def test_later_stages_keep_the_zeros(stage: Any, sparse: Path, make_context: Callable[..., Context], tmp_path: Path) -> None:
    after = tmp_path / "after"
    after.mkdir()
    stage.run(artifact(sparse, "sparsify"), make_context(), after)
    assert json.loads((after / "config.json").read_text())[NOTE] is True
    written = load_file(after / "model.safetensors")  # of a quantized checkpoint scale times code
    for name, where in zeros(load(sparse)).items():
        assert bool((written[f"{name}.weight"][where] == 0).all())


def test_a_smaller_model_keeps_the_zeros_of_what_is_left(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    context, quick = make_context(), {"method": "magnitude", "allocation": "global", "multiple_of": 4, "rows": 16, "sparsity": 0.3}
    made(Sparsify(**QUICK), checkpoint("bert"), context, tmp_path / "sparse")
    models = []
    for name, settings in {"cut": {"least_squares": False, "recover": None}, "made": {"recover": TRAINED}}.items():
        stage = Prune(**{**quick, **settings})  # type: ignore[arg-type]
        models.append(made(stage, tmp_path / "sparse", replace(context, scratch=tmp_path / f"of {name}"), tmp_path / name)[0])
    cut, trained = map(zeros, models)
    assert cut.keys() == trained.keys()
    assert all(torch.equal(cut[name], trained[name]) for name in cut)
    assert not torch.equal(*(weights(model)[next(iter(cut))] for model in models))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": 124}, r"pattern: 124 given; unstructured, N:M with N smaller than M, in quotes \(\"2:4\""),
        ({"pattern": "4:4"}, "pattern: '4:4' given; unstructured, N:M with N smaller than M"),
        ({"pattern": "dense"}, "pattern: 'dense' given; unstructured"),
        ({"pattern": {"block": [0, 4]}}, "pattern.block.0: 0 given"),
        ({"pattern": "2:4", "sparsity": 0.6}, "sparsity: 0.6 given; 2:4 sets it to 0.5"),
        ({"pattern": "2:4", "method": "movement"}, "pattern: 2:4 given; movement supports unstructured or a block"),
        ({"method": "lasso"}, "pattern: unstructured given; lasso needs a block"),
        ({"method": "lasso", "pattern": BLOCK, "lasso": {"groups": "both", "threshold": "balanced"}}, "balanced given with groups: both"),
        ({"movement": {"warmup": 0.6, "cooldown": 0.5}}, "leave no steps between them"),
        ({"learning": {"keep": "best"}}, "learning.keep: 'best' given"),
        ({"teacher": "owner/name"}, "teacher: 'owner/name' given"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Sparsify(**settings)
    (line,) = explain(caught.value, Sparsify, "stages.sparsify")
    assert re.search(message, str(line)), line


@pytest.mark.parametrize(
    "settings",
    [{"method": "magnitude"}, {"method": "sparsegpt"}, {"method": "movement"}, {"method": "lasso", "lasso": {"threshold": "balanced"}}],
    ids=str,
)
def test_blocks_that_come_nowhere_near_the_share_are_refused(
    settings: dict[str, Any], make_model: Callable[..., Any], make_context: Callable[..., Context]
) -> None:
    config, context = make_model("bert").config, make_context()
    block = [1, 16] if settings["method"] == "lasso" else [12, 12]
    layers, share = (18, "0.000") if settings["method"] == "lasso" else (12, "0.562")
    with raises_problem("stages.sparsify.pattern", f"block {block[0]} x {block[1]}", f"{layers} of 18 layers") as caught:
        Sparsify(**{**settings, "pattern": {"block": block}}).check(config, config, context)
    (line,) = caught.value.lines
    assert f"({share} in bert.encoder.layer.0.attention.self.query, 16 x 16); use smaller blocks" in line
    Sparsify(**{**settings, "pattern": BLOCK}).check(config, config, context)
    if settings["method"] != "lasso":
        Sparsify(**{**settings, "pattern": {"block": block}, "exclude": ("*.attention.*",)}).check(config, config, context)


def test_what_cannot_be_is_said_before_anything_runs(make_model: Callable[..., Any], make_context: Callable[..., Context]) -> None:
    config, context = make_model("bert").config, make_context()
    with raises_problem("stages.sparsify.exclude", "'*.layer.9.*'", "matches no layer", "named like bert.encoder"):
        Sparsify(exclude=("*.layer.9.*",)).check(config, config, context)
    with pytest.raises(InputError, match=r"stages.sparsify.lasso.strengths: 'head' matches no layer"):
        Sparsify(lasso={"strengths": {"head": 1.0}}).check(config, config, context)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"stages.sparsify.exclude: every linear layer in the blocks"):
        Sparsify(exclude=("*",)).check(config, config, context)
    learned = Sparsify(method="movement", learning={"hidden_weight": 1})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"stages.sparsify.learning.hidden_weight: 1 given"):
        learned.check(config, make_model("bert", num_hidden_layers=2).config, context)
