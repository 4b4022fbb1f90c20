"""How long stages took on this machine: the memory behind the times that `compress plan` predicts.

Every finished stage adds a line (hardware, stage, work, seconds) to a file in the user's cache folder. A prediction is
`seconds = fixed + rate * work`, fitted to the lines of this hardware that are nearest in work, by least squares with both terms >= 0
(Lawson and Hanson's NNLS, rows weighted by 1 / seconds so that relative errors count). With lines of one size only, half of the time is
taken as fixed. What a stage of a tenth of a second says of one that takes hours is nothing: far beyond the largest line there is no
prediction.
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
REACH = 100.0
"""How many times the work of the largest recorded line a prediction goes."""


def history_file() -> Path:
    """Returns the file of recorded times."""
    return cache_folder() / "times.jsonl"


def record(stage: str, work: float, seconds: float) -> None:
    """Adds one finished stage; where the cache folder cannot be written nothing is remembered, as nothing depends on it."""
    line = json.dumps({"machine": _machine(), "stage": stage, "work": work, "seconds": seconds})
    try:
        history_file().parent.mkdir(parents=True, exist_ok=True)
        with history_file().open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
    except OSError:
        return


def predict(stage: str, work: float) -> float | None:
    """Returns the seconds that a stage with that much work takes here, or None where none of such a size was recorded."""
    latest_first = list(_known(stage))[::-1]
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


def _known(stage: str) -> Iterator[tuple[float, float]]:
    if not history_file().exists():
        return
    machine = _machine()
    for line in history_file().read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
            if (entry["machine"], entry["stage"]) == (machine, stage):
                yield max(1.0, float(entry["work"])), max(1e-3, float(entry["seconds"]))
        except (ValueError, KeyError, TypeError):
            continue  # a line that a kill cut off


def _machine() -> str:
    machine = hardware()
    return digest({key: machine[key] for key in ("cpu", "cpu_features", "cores", "gpus")})[:16]
