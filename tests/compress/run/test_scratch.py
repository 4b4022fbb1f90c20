"""Disk space that a step takes only while it runs: predicted, compared with what is written, and part of what a run needs.

python -m pytest tests/compress/run/test_scratch.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.commands.plan import _predicted
from compress.forecast import PlannedStep, lacks
from compress.run.disk import scratch_bytes
from compress.run.room import Room
from compress.run.speed import Speed
from foundation.core.target import Target
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from quantize.quantize import Quantize
from quantize.rotation.stored import rotate_folder
from tests import tiny_language_models as tiny
from tests.told import Told

ROTATED: dict[str, Any] = {"scheme": "w8a16", "rotation": "hadamard"}
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 192}


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("text-generation", tiny.data(), tiny.LENGTH, Target(), 0, Told(), tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_a_streamed_rotation_writes_what_is_predicted(tied: bool, tmp_path: Path, context: Context) -> None:
    folder = tiny.write(tmp_path / "model", "llama", tie_word_embeddings=tied, **SIZES)
    stage, config = Quantize(stream=True, **ROTATED), Checkpoint(folder).config
    predicted = scratch_bytes(stage, stage.config_after(config), context)
    rotate_folder(folder, tmp_path / "rotated", 0, "rotation")
    written = sum(file.stat().st_size for file in (tmp_path / "rotated").glob("*.safetensors"))
    assert predicted <= written <= 1.05 * predicted  # and the headers of the files


def test_only_a_streamed_rotation_takes_it(tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Checkpoint(tiny.write(tmp_path / "model", "llama")).config
    classes = replace(context, task="text-classification")
    for stage, of in (
        (Quantize(stream=True, scheme="w8a16"), context),
        (Quantize(stream=False, **ROTATED), context),
        (Quantize(**ROTATED), context),  # small enough for memory
        (Quantize(**ROTATED), classes),
    ):
        assert scratch_bytes(stage, config, of) == 0
    monkeypatch.setattr("foundation.models.streaming.available_bytes", lambda: 1000)
    assert scratch_bytes(Quantize(**ROTATED), config, context) > 0
    assert scratch_bytes(Quantize(**{**ROTATED, "rotation": "learned"}), config, context) == 0


def test_a_run_needs_it_once_besides_its_artifacts(tmp_path: Path) -> None:
    steps = [PlannedStep(Quantize(id=name), None, None, None, (), 100, 0.0, scratch_bytes=900) for name in ("a", "b")]  # type: ignore[arg-type]
    assert lacks(steps, Room(700, 10**15, tmp_path)).refused
    assert not lacks(steps, Room(1000, 10**15, tmp_path)).refused  # two thirds of 1,100 fit
    assert lacks(steps, Room(1000, 10**15, tmp_path)).warned
    cached: Any = object()
    assert not lacks([replace(step, cached=cached) for step in steps], Room(1, 10**15, tmp_path)).refused


@pytest.mark.parametrize("cached", [False, True])
def test_the_plan_says_it_in_the_line_of_the_step(cached: bool) -> None:
    counted: Any = {"id": "quantize", "stage": "quantize", "parameters": None, "flops": None, "disk_bytes": 10**6, "note": "", "parts": {}}
    counted |= {"scratch_bytes": 4 * 10**9, "memory_bytes": 10**9, "cached": cached, "stored": False, "reuses": False}
    found = _predicted(counted, Speed(1e9, 1e9, 1.0, 1e9))
    assert ("4.00 GB more on disk while it runs" in found.line) != cached
    assert found.scratch_bytes == (0 if cached else 4 * 10**9)
