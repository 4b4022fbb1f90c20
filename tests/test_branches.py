"""A recipe with branches end to end on a tiny ViT: each stage takes the model that its `input` names, and one report shows them all."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from compress.commands.plan import describe
from compress.forecast import steps_of
from compress.pipeline import Outcome, run
from compress.recipe import check
from compress.run.prepare import prepare
from foundation.artifacts.run_folder import open_run
from foundation.core.progress import ConsoleProgress
from tests.tiny_recipes import tiny_vit

pytestmark = [pytest.mark.whole, pytest.mark.slow, pytest.mark.usefixtures("engines_inside", "no_clocks")]

QUIET = ConsoleProgress("quiet")
RAW: dict[str, Any] = {
    **tiny_vit("branches"),
    "target": {"engines": ["onnxruntime"], "batch_sizes": [1]},
}
FINETUNE = {"finetune": {"epochs": 0.05, "learning_rate": 1e-3}}
HALF = {
    "prune": {"id": "half", "input": "baseline", "sparsity": 0.3, "granularity": ["ffn"], "multiple_of": 8, "rows": 16, "recover": None}
}


def quantize(name: str, **more: Any) -> dict[str, Any]:
    return {"quantize": {"id": name, "calibration": {"rows": 16}, **more}}


STAGES = [FINETUNE, quantize("whole"), HALF, quantize("small"), quantize("again", input="finetune"), {"export": {}}]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(check({**RAW, "stages": STAGES}), tmp_path_factory.mktemp("runs") / "run", progress=QUIET)


def test_every_branch_is_a_row_with_the_stages_it_is_made_by(finished: Outcome) -> None:
    variants = {variant["id"]: variant for variant in finished.report["variants"]}
    assert {name: variant["stages"] for name, variant in variants.items()} == {
        "finetune": ["finetune"],
        "whole": ["finetune", "whole"],
        "half": ["finetune", "half"],
        "small": ["finetune", "half", "small"],
        "again": ["finetune", "again"],
    }
    assert variants["small"]["parameters"] == variants["half"]["parameters"] < variants["finetune"]["parameters"]
    assert variants["again"]["parameters"] == variants["whole"]["parameters"] == variants["finetune"]["parameters"]
    assert all(variant["latency"] for variant in variants.values()), "every end of a branch and its float model are timed"
    page = (finished.folder / "report.html").read_text()
    assert "finetune &gt; half &gt; small" in page


def test_a_branch_does_not_depend_on_the_ones_beside_it(finished: Outcome, tmp_path: Path) -> None:
    made = open_run(finished.folder)
    assert made.artifacts["again"].manifest["parents"] == [made.artifacts["finetune"].digest]
    files = [{name: file["sha256"] for name, file in made.artifacts[id_].manifest["files"].items()} for id_ in ("whole", "again")]
    assert files[0] == files[1], "the same stage of the same input comes to the same"
    stages = [FINETUNE, {"prune": {**HALF["prune"], "input": None}}, quantize("small")]
    shutil.copytree(finished.folder, tmp_path / "run", symlinks=True)
    alone = run(check({**RAW, "stages": stages}), tmp_path / "run", progress=QUIET)
    assert {stage["id"] for stage in alone.report["stages"] if stage["cached"]} >= {"finetune", "half", "evaluate-half", "small"}


def test_the_plan_of_branches_equals_the_run(finished: Outcome) -> None:
    recipe = check({**RAW, "stages": STAGES})
    planned = {entry.step.id: entry for entry in steps_of(recipe, Path("absent"), prepare(recipe, Path("absent"), QUIET))}
    for variant in finished.report["variants"]:
        size = planned[variant["id"]].size
        assert size is not None
        assert (size.parameters, size.macs) == (variant["parameters"], variant["macs"])
    made = open_run(finished.folder).artifacts["export"].size_bytes
    assert planned["export"].disk_bytes == pytest.approx(made, rel=0.5)
    told = describe(recipe, finished.folder).partition("\nstep ")[2].partition("\ntotal:")[0].splitlines()[1:]
    assert len(told) == len(planned)
    assert all("cached" in line for line in told), told
