"""The shipped recipe that alternates depth, width and short distillation, on a tiny decoder; `tests.test_recipes` runs the rest of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compress.pipeline import Outcome, run
from compress.recipe import check, read
from foundation.artifacts.run_folder import open_run
from foundation.core.progress import ConsoleProgress
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load
from tests.foundation import tiny_gpt

pytestmark = [pytest.mark.whole, pytest.mark.slow]

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "wikitext2-gpt-minitron.yaml"
QUICK: dict[str, Any] = {"rows": 64, "multiple_of": 8}
LEARNS: dict[str, Any] = {"learning_rate": 2e-3, "batch_size": 16}
BARE = "bare"
"""The width of the recipe without its distillation."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    given = {stage.id: stage.model_dump(mode="json", exclude_none=True) for stage in read(RECIPE).stages if stage.NAME == "prune"}
    depth, width = ({**given[name], **QUICK, "recover": {**given[name]["recover"], **LEARNS}} for name in ("depth", "width"))
    recipe = {
        "name": "tiny",
        "model": {"config": {**tiny_gpt.CONFIGS["gpt2"], "n_layer": 3}, "init": "random", "task": "text-generation"},
        "tokenizer": {"train": "bpe", "vocab_size": tiny_gpt.VOCABULARY},
        "data": {"path": str(tiny_gpt.data_folder()), "max_length": tiny_gpt.LENGTH},
        "target": {"engines": ["onnxruntime"], "batch_sizes": [1], "sequence_lengths": [8], "threads": 1},
        "stages": [
            {"finetune": {"epochs": 8, "learning_rate": 0.005, "batch_size": 16}},
            {"prune": depth},
            {"prune": {**width, "id": BARE, "recover": None}},
            {"prune": {**width, "input": "depth"}},
        ],
    }
    return run(check(recipe), tmp_path_factory.mktemp("runs") / "tiny", progress=ConsoleProgress("quiet"))


def test_depth_goes_first_and_width_starts_from_what_is_left(finished: Outcome) -> None:
    artifacts = open_run(finished.folder).artifacts
    depth, width = (artifacts[name].metrics for name in ("depth", "width"))
    losses = depth["steps"][0]["layer_losses"]
    assert len(losses) == 3
    assert depth["layers"] == sorted(sorted(range(3), key=lambda layer: -losses[layer])[:2])
    assert width["before"] == depth["after"]
    sizes = Structure.of(load(artifacts["width"].path), "width").sizes
    assert (len(sizes.heads), sizes.hidden) == (2, 24)
    assert len(set(sizes.heads)) == len(set(sizes.ffn)) == 1  # every layer has the same shape
    assert sizes.ffn[0] < 128
    assert width["sparsity"] >= 0.3


def test_both_learn_from_the_logits_of_the_unpruned_model_alone(finished: Outcome) -> None:
    for name in ("depth", "width"):
        metrics = open_run(finished.folder).artifacts[name].metrics
        for epoch in metrics["steps"][0]["losses"]:
            assert epoch["cross_entropy"] == 0
            assert epoch["loss"] == epoch["teacher"] > 0
    teachers = [stage.teacher for stage in read(RECIPE).stages if stage.NAME == "prune"]  # type: ignore[attr-defined]
    assert teachers == ["baseline", "baseline"]


def test_distillation_repairs_what_was_cut(finished: Outcome) -> None:
    cells = {variant["id"]: variant["accuracy"]["torch"]["value"] for variant in finished.report["variants"]}
    assert cells["finetune"] < cells["width"] < 0.95 * cells[BARE]
