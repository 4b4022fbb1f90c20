"""Recorded durations of stages on this machine, from which `compress plan` predicts times.

Every finished stage appends a line (hardware, stage, work, seconds, whether it took parts from earlier runs) to a file in the user's cache
folder. A stage that has to make all parts is predicted from lines of its own kind alone; one that finds some, too, where there are such. A
prediction is
`seconds = fixed + rate * work`, fitted by non-negative least squares (NNLS, Lawson and Hanson) to the lines of this hardware with the
most similar work, weighted by 1 / seconds so that relative errors count. If all lines have the same work, half of the time counts as fixed.
There is no prediction far beyond the largest recorded work, because a stage of 0.1 s says nothing about one that takes hours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from compress.artifacts.artifact import digest
from compress.machine.environment import cache_folder, hardware

KEPT = 20
"""Lines that a prediction is fitted to."""
REACH = 100.0
"""A prediction reaches up to this multiple of the largest recorded work."""


def history_file() -> Path:
    """Returns the path of the recorded durations."""
    return cache_folder() / "times.jsonl"


def record(stage: str, work: float, seconds: float, *, reused: bool = False) -> None:
    """Records a finished stage; does nothing if the cache folder is not writable, because no result depends on it."""
    line = json.dumps({"machine": _machine(), "stage": stage, "work": work, "seconds": seconds, "reused": reused})
    try:
        history_file().parent.mkdir(parents=True, exist_ok=True)
        with history_file().open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
    except OSError:
        return


def predict(stage: str, work: float, *, reuses: bool = False) -> float | None:
    """Returns the predicted seconds of a stage with that work; None if no comparable run was recorded.

    Args:
        stage: Its name.
        work: Its work.
        reuses: Whether it will take parts from earlier runs.
    """
    latest_first = ((reuses and list(_known(stage, reused=True))) or list(_known(stage, reused=False)))[::-1]
    known = sorted(latest_first, key=lambda entry: abs(math.log(entry[0] / max(1.0, work))))[:KEPT]
    if not known or work > REACH * max(size for size, _ in known):
        return None
    works, seconds = np.array(known).T
    if np.ptp(np.log(works)) < 0.01:
        return float(np.median(seconds) * (1 + work / np.median(works)) / 2)
    from scipy.optimize import nnls

    scale = works.max()
    (fixed, rate), _ = nnls(np.stack([np.ones_like(works), works / scale], axis=1) / seconds[:, None], np.ones_like(seconds))
    return float(fixed + rate * work / scale)


def _known(stage: str, reused: bool) -> Iterator[tuple[float, float]]:
    if not history_file().is_file():
        return
    machine = _machine()
    for line in history_file().read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            if (entry["machine"], entry["stage"], entry.get("reused", False)) == (machine, stage, reused):
                work, seconds = float(entry["work"]), float(entry["seconds"])
                if math.isfinite(work) and math.isfinite(seconds):
                    yield max(1.0, work), max(1e-3, seconds)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # truncated by a kill


def _machine() -> str:
    machine = hardware()
    return digest({key: machine[key] for key in ("cpu", "cpu_features", "cores", "gpus")})[:16]
