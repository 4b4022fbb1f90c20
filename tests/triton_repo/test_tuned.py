"""The search over settings on the real server, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foundation.artifacts.triton import Results
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.labels.classes import ClassIds
from foundation.stage.context import Context
from tests.triton_repo import tiny_exports as tiny
from triton_repo.config import SETTINGS, from_text
from triton_repo.triton_repo import REPOSITORY, TritonRepo
from triton_repo.tuning.load import Level, Loaded
from triton_repo.tuning.settings import Tune
from triton_repo.tuning.space import Point

TUNE = Tune(seconds=0.3, repeats=5, concurrency=(1, 4), instances=(1, 2), max_batch_size=(4,), max_queue_delay_us=(0,))


def context(folder: Path) -> Context:
    rows = tiny.TEXTS
    data: Any = SimpleNamespace(labels=(), evaluation=SimpleNamespace(rows=rows, labels=ClassIds(np.zeros(len(rows), np.int64))))
    return Context("text-classification", data, 16, Target(threads=2), 0, ConsoleProgress("quiet"), folder)


def served(repository: Path) -> tuple[Any, dict[str, Any]]:
    """Returns the configuration and the settings of the one model of a repository."""
    (file,) = repository.glob("*/config.pbtxt")
    return from_text(file.read_text()), json.loads((file.parent / "1" / SETTINGS).read_text())


def test_each_setting_is_written_as_it_would_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported, seen = tiny.export(tmp_path / "export", tiny.text_preprocessor(), tiny.TEXTS), {}

    def measured(write: Any, model: str, rows: Any, tune: Tune, scratch: Path) -> Any:
        def measure(point: Point, seconds: float, limit_ms: float | None) -> Loaded:
            if point not in seen:
                folder = tmp_path / f"point-{len(seen)}"
                write(point, folder)
                seen[point] = served(folder)
            return Loaded((Level(4, 100.0 * point.instances, 1.0, 5.0, 0),), limit_ms)

        return measure

    monkeypatch.setattr("triton_repo.tuning.tuning.measured", measured)
    monkeypatch.setattr(TritonRepo, "_results", lambda self, models, measure: Results())
    (tmp_path / "out").mkdir()
    TritonRepo(tune=TUNE).run(exported, context(tmp_path), tmp_path / "out")
    assert seen.keys() == {Point(1, 2, 8, 0), Point(1, 2, 4, 0), Point(2, 1, 4, 0)}
    for point, (config, settings) in seen.items():
        assert config.instance_group[0].count == point.instances
        assert config.max_batch_size == point.max_batch_size
        assert config.dynamic_batching.max_queue_delay_microseconds == point.max_queue_delay_us
        assert settings["properties"]["INFERENCE_NUM_THREADS"] == str(point.threads)
    assert served(tmp_path / "out" / REPOSITORY) == seen[Point(2, 1, 4, 0)]
    found = json.loads((tmp_path / "out" / "triton.json").read_text())["tuned"]
    assert found["best"] == {"instances": 2, "threads": 1, "max_batch_size": 4, "max_queue_delay_us": 0}
    assert [trial["own"] for trial in found["trials"]].count(True) == 1


@pytest.mark.slow
def test_settings_are_searched_on_the_real_server(tmp_path: Path) -> None:
    exported = tiny.export(tmp_path / "export", tiny.text_preprocessor(), tiny.TEXTS)
    (tmp_path / "out").mkdir()
    TritonRepo(tune=TUNE).run(exported, context(tmp_path), tmp_path / "out")
    document = json.loads((tmp_path / "out" / "triton.json").read_text())
    found = document["tuned"]
    assert len(found["trials"]) == 3
    assert found["trials"][0]["rows_per_s"] > 0
    assert {key: found["trials"][0][key] for key in found["best"]} == found["best"]
    confirmed = found["confirmation"]
    assert found["trials"][0]["own"] == (confirmed is None or not confirmed["taken"])
    assert confirmed is None or len(confirmed["rows_per_s"]) == len(confirmed["own_rows_per_s"]) == confirmed["repeats"] == TUNE.repeats
    config, settings = served(tmp_path / "out" / REPOSITORY)
    best = found["best"]
    assert (config.instance_group[0].count, config.max_batch_size) == (best["instances"], best["max_batch_size"])
    assert settings["properties"]["INFERENCE_NUM_THREADS"] == str(best["threads"])
    assert document["models"][0]["disagreements"] == 0
