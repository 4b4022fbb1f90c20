"""Everything that comes after takes a pruned model: a recipe from distillation to the Triton repository, on a tiny BERT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compress.api import load_checkpoint
from compress.commands.plan import describe
from compress.forecast import steps_of
from compress.pipeline import Outcome, run
from compress.recipe import Recipe, check
from compress.run.prepare import prepare
from foundation.artifacts.run_folder import open_run
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.models.checkpoint import load
from foundation.models.size import count
from tests.export import sentiment
from tests.prune import small_runs

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

PRUNE: dict[str, Any] = {
    "sparsity": 0.4,
    "granularity": ["heads", "ffn", "vocabulary"],
    "multiple_of": 8,
    "method": "fisher",
    "allocation": "global",
    "rows": 64,
    "max_unknown": 1,
    "recover": {"epochs": 0.5, "loss": "minilm"},
}


def recipe(folder: Path, stages: list[dict[str, Any]], engine: str = "onnxruntime") -> Recipe:
    """Some words of the vocabulary never occur in the data."""
    rows = [" ".join(word for word in text.split() if word not in ("this", "very", "was")) or "film" for text in sentiment.rows(150)]
    return small_runs.recipe(folder, "pruned", rows, [engine], stages)


STAGES: list[dict[str, Any]] = [
    {"prune": PRUNE},
    {"distill": {"epochs": 0.5, "student": {"layers": 1}}},
    {"quantize": {"calibration": {"rows": 64}, "mode": "qat", "qat": {"epochs": 0.2, "loss": "distilbert"}, "teacher": "baseline"}},
    {"export": {}},
    {"triton_repo": {"serve": False}},
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "foundation.measure.latency.measure", lambda specs, shapes, progress, *watched: []
        )  # how fast they are is tested elsewhere
        folder = tmp_path_factory.mktemp("pruned")
        return run(recipe(folder, STAGES), folder / "run", progress=ConsoleProgress("quiet"))


def test_every_stage_takes_it(finished: Outcome) -> None:
    variants = {variant["id"]: variant for variant in finished.report["variants"]}
    assert list(variants) == ["baseline", "prune", "distill", "quantize"]
    for hop in ("torch", "onnxruntime"):
        assert variants["quantize"]["accuracy"][hop]["n"] == 15
    assert (finished.folder / "model_repository").exists()
    made = open_run(finished.folder).artifacts["prune"].metrics
    assert 0.4 <= made["sparsity"] < 0.5
    assert made["vocabulary"]["vocabulary"] == 22 - 3
    assert made["after"]["vocabulary"] == 19
    assert [len(step["losses"]) for step in made["steps"]] == [1]


def test_figures_are_those_of_the_checkpoint(finished: Outcome) -> None:
    artifact, variant = open_run(finished.folder).artifacts["prune"], finished.report["variants"][1]
    before, after = finished.report["variants"][0], artifact.metrics
    model: Any = load(artifact.path)
    assert variant["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    blocks = sum(layer.weight.numel() for name, layer in model.named_modules() if ".encoder." in name and hasattr(layer, "in_features"))
    assert after["cost"]["after"] == blocks
    attention = 2 * 16 * 16 * 8 * (8 - sum(after["after"]["heads"]))  # the products of 2 x 4 heads of 8 numbers, and of those left
    assert before["macs"] - variant["macs"] == 16 * (after["cost"]["before"] - after["cost"]["after"]) + attention
    assert count(model, "text-classification", 16).macs == variant["macs"]


def test_transformers_alone_says_what_to_call(finished: Outcome) -> None:
    folder = open_run(finished.folder).artifacts["prune"].path
    assert "compress_architecture" in json.loads((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"model type `bert, in a shape of its own: load it with compress.api.load_checkpoint\(folder\)`"):
        transformers.AutoModel.from_pretrained(folder)
    names = load(folder).state_dict()
    assert all(torch.equal(value, names[name]) for name, value in load_checkpoint(folder).state_dict().items())


@pytest.mark.slow
def test_a_pruned_model_is_where_a_recipe_starts(finished: Outcome, tmp_path: Path) -> None:
    folder = open_run(finished.folder).artifacts["prune"].path
    stages = [
        {"distill": {"epochs": 0.25, "student": {"layers": 1}, "teacher": "baseline"}},
        {"prune": {**PRUNE, "schedule": "cubic", "iterations": 2, "recover": {"epochs": 0.5, "loss": "minilmv2"}}},
    ]
    again = check({**recipe(tmp_path, stages).model_dump(mode="json", exclude={"stages"}), "stages": stages})
    again = again.model_copy(update={"model": again.model.model_copy(update={"path": str(folder)})})
    outcome = run(again, tmp_path / "run", progress=ConsoleProgress("quiet"))
    sizes = [variant["parameters"] for variant in outcome.report["variants"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


@pytest.mark.slow
def test_the_plan_of_a_uniform_allocation_is_what_comes_of_it(tmp_path: Path) -> None:
    stages = [{"prune": {**PRUNE, "granularity": ["heads", "ffn", "hidden"], "allocation": "uniform", "recover": None}}]
    asked = recipe(tmp_path, stages)
    assert "prune" in describe(asked, tmp_path / "run")
    planned = {
        entry.step.id: entry.size for entry in steps_of(asked, Path("absent"), prepare(asked, Path("absent"), ConsoleProgress("quiet")))
    }
    outcome = run(asked, tmp_path / "run", progress=ConsoleProgress("quiet"))
    size = planned["prune"]
    assert size is not None
    assert (size.parameters, size.macs) == tuple(outcome.report["variants"][1][key] for key in ("parameters", "macs"))


@pytest.mark.parametrize("first", [[], [{"finetune": {"epochs": 0.5}}]], ids=["model", "finetune"])
def test_a_plan_counts_what_a_student_is_faster_than_the_model_of_over(first: list[dict[str, Any]], tmp_path: Path) -> None:
    """One layer of two is twice as fast: three times as fast as both is 1.5 times as fast as the one. The baseline may be fine-tuned."""
    sizes = []
    for speedup in ({"speedup": 1.5}, {"speedup": 3.0, "over": "baseline"}, {"speedup": 3.0}):
        cut = {"measure": "latency", "allocation": "uniform", "multiple_of": 8, "recover": None, **speedup}
        asked = recipe(tmp_path, [*first, {"distill": {"epochs": 0.5, "student": {"layers": 1}}}, {"prune": cut}])
        steps = steps_of(asked, Path("absent"), prepare(asked, Path("absent"), ConsoleProgress("quiet")))
        sizes.append(next(entry.size for entry in steps if entry.step.id == "prune"))
    alone, counted, further = sizes
    assert alone == counted
    assert further.macs < alone.macs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sparsity": 0.95, "granularity": ["heads"]},
            "sparsity: 0.95 given; pruning heads can remove at most 0.375 of the blocks' cost: add ffn or hidden",
        ),
        ({"granularity": ["experts"], "measure": "parameters"}, "granularity: experts given; this model has none"),
        ({"protect": ["*.layer.7.*"]}, r"protect: '\*.layer.7.\*' matches nothing; modules are named like bert.encoder"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    asked = recipe(tmp_path, [{"prune": {**PRUNE, **changes}}])
    with pytest.raises(InputError, match=f"stages.prune.{message}"):
        describe(asked, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_milliseconds_are_those_of_real_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is asserted: what is asked for is a share, and the table, whatever it says, is what the share is of."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("foundation.measure.latency.MAX_SECONDS", 0.05)
    stages = [
        {"prune": {"measure": "latency", "sparsity": 0.1, "method": "magnitude", "allocation": "global", "rows": 16, "recover": None}}
    ]
    asked = recipe(tmp_path, [*stages, {"quantize": {"calibration": {"rows": 16}}}], "openvino")
    outcome = run(asked, tmp_path / "run", progress=ConsoleProgress("quiet"))
    figures = outcome.report["variants"][1]["pruning"]
    told = figures["latency"]
    assert (told["engine"], told["precision"], told["batch"], told["sequence"]) == ("openvino", "int8", 1, 8)
    assert len(told["points"]) == len(told["heads"]["counts"]) + len(told["ffn"]["counts"]) + 2  # and two whose last block differs
    assert all(ms > 0 for *_, ms in told["points"])
    assert told["before"]["measured_ms"] > 0
    assert told["after"]["measured_ms"] > 0
    assert figures["cost"]["after"] <= 0.9 * figures["cost"]["before"]
    assert '<section id="pruning">' in (tmp_path / "run" / "report.html").read_text()
    assert len(list((tmp_path / "cache" / "compress" / "latency").iterdir())) == 1
