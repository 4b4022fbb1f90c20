"""The Python API: the page that shows it is run block by block, with little training and one shape."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compress.api
from compress.api import load_recipe
from compress.report.document import Report
from foundation.artifacts.timed import Timing
from foundation.core.errors import InputError
from foundation.core.progress import Progress
from foundation.measure.latency import Cell, Shape
from foundation.measure.samples import Turn
from foundation.stage.context import Job
from tests.tiny_recipes import tiny_vit

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "python-api.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
SHRUNK = [
    *(f"model.config.{name}={value}" for name, value in tiny_vit("tiny")["model"]["config"].items()),  # whose graph other tests trace, too
    "stages.triton_repo.serve=false",
    "target={engines: [openvino], batch_sizes: [1], threads: 1}",
]


def _fewer(settings: Sequence[str]) -> list[str]:
    """Returns what makes a run short; other rows for calibration where the page asks for others."""
    return ["stages.finetune.epochs=0.2", f"stages.quantize.calibration.rows={48 if any('rows=' in one for one in settings) else 64}"]


SLOW = ("run(fewer", "serve(")
"""What the quick test leaves to the slow one: a second run and the server."""


def run_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Runs the blocks of the page in one namespace, in `folder`, but for those that hold a text of `left_out`."""

    def shrunk(source: str | Mapping[str, Any], settings: Any = ()) -> Any:
        return load_recipe(source, [*settings, *([*SHRUNK, *_fewer(settings)] if source == "quickstart" else [])])

    monkeypatch.chdir(folder)
    monkeypatch.setattr(compress.api, "load_recipe", shrunk)
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)  # fewer engines: starting each takes seconds
    names: dict[str, Any] = {}
    for block in BLOCKS:
        if not any(text in block for text in left_out):
            exec(compile(block, str(PAGE), "exec"), names)
    return names


def untimed(jobs: Sequence[Job], shapes: Sequence[Shape], progress: Progress, *watched: Any) -> list[tuple[int, Timing]]:
    """Stands for `foundation.measure.latency.measure`, which starts a process for each engine, three times on this page."""
    cells = [(index, job, shape, Cell()) for index, job in enumerate(jobs) for shape in shapes]
    for index, _, _, cell in cells:
        cell.turns = [Turn(np.full(10, 2.0 if index == 0 else 0.5)) for _ in range(3)]
        cell.placement = {"device": "cpu", "provider": "nobody", "float_precision": "fp32"}
    return [(index, cell.row(job, shape)) for index, job, shape, cell in cells]


@pytest.mark.whole
@pytest.mark.usefixtures("engines_inside")
def test_the_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", untimed)
    names = run_blocks(tmp_path, monkeypatch, SLOW)
    report = names["report"]
    assert isinstance(report, Report)
    assert list(report.variants) == ["finetune", "quantize"]
    assert report.last.accuracy["openvino"].n == 360
    assert report.speedup == 4.0
    out = capsys.readouterr().out
    assert "stages.quantize.mode: 'ptk' given" in out
    assert "did you mean 'max_length'?" in out
    assert repr(report) in out
    assert len(names["table"]) == len(report.latency) > 4
    assert re.search(r"digits: image-classification, run folder runs/digits", out)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_page_runs_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    second = run_blocks(tmp_path, monkeypatch)["second"]
    assert {stage["id"]: stage["cached"] for stage in second.data["stages"]} == {
        "model": True, "finetune": True, "evaluate-finetune": True, "quantize": False, "evaluate-quantize": False, "export": False,
        "latency": False, "triton_repo": False,
    }  # fmt: skip
    assert '"name":"quickstart"' in capsys.readouterr().out


def test_the_quick_test_leaves_little_out() -> None:
    assert len(BLOCKS) >= 10
    assert sum(any(text in block for text in SLOW) for block in BLOCKS) == len(SLOW)


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, compress.api; assert not {'torch', 'transformers', 'pydantic', 'scipy'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_name_is_there_and_says_what_it_is() -> None:
    for name in compress.api.__all__:
        assert getattr(compress.api, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'load'"):
        compress.api.load  # noqa: B018


def test_a_recipe_as_data_is_left_as_it_is() -> None:
    raw = {
        "name": "x",
        "model": {"path": "a/b", "task": "text-classification"},
        "data": {"path": "c/d", "columns": {"text": "t"}},
        "stages": [{"quantize": {"mode": "ptq"}}, {"export": None}],
    }
    before = repr(raw)
    recipe = load_recipe(raw, ["stages.quantize.calibration.rows=64", "data.max_length=32"])
    assert repr(raw) == before
    assert recipe.stage("quantize").calibration.rows == 64  # type: ignore[attr-defined]
    assert recipe.data.max_length == 32


def test_wrong_settings_are_named() -> None:
    with pytest.raises(InputError, match="no stage has the id 'quantise'"):
        load_recipe("quickstart", ["stages.quantise.mode=ptq"])
