"""Recorded steps on this machine, from which `compress plan` predicts times and memory.

Every finished step appends a line to a file in the user's cache folder: hardware, stage, amounts of its parts
(`compress.run.expected`), seconds, memory, how busy the machine was, whether it took parts from earlier runs. A step that has to make all
parts is predicted from lines of its own kind alone; one that finds some, too, where there are such.

With amounts a_j, the seconds p_j that one of each should take on this machine, and recorded seconds y_i, the factors z_j >= 0 minimize

    sum over lines i of  (sum_j m_ij z_j - 1)^2  +  sum_j w_j (z_j - 1)^2,        m_ij = a_ij p_j / y_i
    w_j = 0.3 mean_i m_ij^2 + 0.05 mean_i (sum_j m_ij)^2

so that a part with a small share in all lines keeps what the calibration says of it: a stage of 0.1 s tells little of one that takes hours.
Lines of like size count, the latest first. Lines of a busy machine count only where there are no others, with their seconds
divided by how much it was slowed down.

    range = prediction times and over exp(1.3 s),   s^2 = (2 ln(1.8)^2 + sum_i ln(y_i / prediction_i)^2) / (2 + number of lines)
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from foundation.artifacts.artifact import digest
from foundation.machine.environment import cache_folder, hardware, processor

KEPT = 20
"""Lines that a prediction is fitted to."""
SWEEPS = 200
OWN, SHARED = 0.3, 0.05
"""How much the calibration weighs against lines, for a part in proportion to its share and for all parts alike."""
BUSY = 0.5
"""Number of other running programs from which on a record counts only if no better one exists."""
UNKNOWN = math.log(1.8)
PRIOR_LINES = 2
WIDTH = 1.3
"""Standard deviations from the prediction to either end: 4 of 5 runs lie between."""


@dataclass(frozen=True)
class Expected:
    """Predicted seconds."""

    low: float
    seconds: float
    high: float

    @classmethod
    def total(cls, each: Sequence[Expected]) -> Expected:
        """Returns the sum; errors of different steps are taken as independent."""
        seconds = sum(one.seconds for one in each)
        below = math.sqrt(sum((one.seconds - one.low) ** 2 for one in each))
        above = math.sqrt(sum((one.high - one.seconds) ** 2 for one in each))
        return cls(max(0.0, seconds - below), seconds, seconds + above)


class Line(TypedDict):
    """A recorded step."""

    parts: dict[str, float]
    seconds: float
    reused: bool
    busy: float
    """Threads of other programs."""
    memory: tuple[int, int] | None
    """Bytes that were predicted, and bytes that were taken."""


NO_TIME = Expected(0.0, 0.0, 0.0)


def history_file() -> Path:
    """Returns the path of the recorded steps."""
    return cache_folder() / "times.jsonl"


def others_running(threads: int, load: float | None = None) -> tuple[float, float]:
    """Returns how many threads of other programs have been running at one time in the last minute, and how much that slows one program.

    Args:
        threads: Threads of the program itself.
        load: Running threads of the machine; default: its mean of the last minute.
    """
    others = max(0.0, (os.getloadavg()[0] if load is None else load) - threads)
    return others, max(1.0, (threads + others) / max(threads, hardware()["cores"]))


def record(
    stage: str,
    parts: Mapping[str, float],
    seconds: float,
    *,
    reused: bool = False,
    busy: tuple[float, float] = (0.0, 1.0),
    memory: tuple[int, int] | None = None,
) -> None:
    """Records a finished step; does nothing if the cache folder is not writable, because no result depends on it.

    Args:
        stage: Name of the stage.
        parts: Its amounts.
        seconds: What it took.
        reused: Whether it took parts from earlier runs.
        busy: See `others_running`.
        memory: Bytes that were predicted, and bytes that were taken.
    """
    entry = {"machine": _machine(), "stage": stage, "parts": dict(parts), "seconds": seconds, "reused": reused, "busy": list(busy)}
    line = json.dumps(entry | ({} if memory is None else {"memory": list(memory)}))
    try:
        history_file().parent.mkdir(parents=True, exist_ok=True)
        with history_file().open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
    except OSError:
        return


def predict(stage: str, parts: Mapping[str, float], one: Mapping[str, float], *, reuses: bool = False) -> Expected:
    """Returns the predicted seconds of a step.

    Args:
        stage: Name of the stage.
        parts: Its amounts.
        one: Seconds of one of each part on this machine, without any record.
        reuses: Whether it will take parts from earlier runs.
    """
    names = sorted(parts)
    prior = np.array([parts[name] * one[name] for name in names])
    same = [line for line in _lines(stage) if line["parts"].keys() == parts.keys()]
    reusing = [line for line in same if line["reused"]] if reuses else []
    known = reusing or [line for line in same if not line["reused"]]
    quiet = [line for line in known if line["busy"] < BUSY]
    expected = [sum(line["parts"][name] * one[name] for name in names) for line in quiet or known]
    order = sorted(range(len(expected)), key=lambda number: (abs(math.log(max(1e-9, expected[number]) / max(1e-9, prior.sum()))), -number))
    chosen = [(quiet or known)[number] for number in order[:KEPT]]
    if not chosen:
        return _around(float(prior.sum()), [])
    seconds = np.array([line["seconds"] for line in chosen])
    relative = np.array([[line["parts"][name] * one[name] for name in names] for line in chosen]) / seconds[:, None]
    factors = _factors(relative)
    return _around(float(prior @ factors), np.log(np.maximum(1e-9, relative @ factors)).tolist())


def predicted_memory(stage: str, size: int) -> int:
    """Returns the predicted memory of a step, corrected by what was taken in earlier runs where that much was predicted.

    Args:
        stage: Name of the stage.
        size: Bytes that `compress.run.memory` predicts.
    """
    known = [line["memory"] for line in _lines(stage) if line["memory"] is not None]
    near = sorted(known, key=lambda pair: abs(math.log(pair[0] / max(1, size))))[:KEPT]
    near = [pair for pair in near if abs(math.log(pair[0] / max(1, size))) < math.log(4)]
    return size if not near else round(size * float(np.exp(np.median([math.log(taken / said) for said, taken in near]))))


def _factors(relative_NP: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the factors of the parts, by coordinate descent; see the top of this file."""
    count = relative_NP.shape[1]
    weight_P = OWN * np.mean(relative_NP**2, axis=0) + SHARED * np.mean(relative_NP.sum(axis=1) ** 2)
    factors_P, curvature_PP = np.ones(count), relative_NP.T @ relative_NP + np.diag(weight_P)
    slope_P = relative_NP.sum(axis=0) + weight_P
    for _ in range(SWEEPS):
        for part in range(count):
            rest = slope_P[part] - curvature_PP[part] @ factors_P + curvature_PP[part, part] * factors_P[part]
            factors_P[part] = max(0.0, rest / curvature_PP[part, part])
    return factors_P


def _around(seconds: float, misses: Sequence[float]) -> Expected:
    spread = math.sqrt((PRIOR_LINES * UNKNOWN**2 + sum(miss**2 for miss in misses)) / (PRIOR_LINES + len(misses)))
    return Expected(seconds / math.exp(WIDTH * spread), seconds, seconds * math.exp(WIDTH * spread))


def _lines(stage: str) -> Iterator[Line]:
    """Yields the lines of a stage on this machine, the oldest first."""
    try:
        state = history_file().stat()
    except OSError:
        return
    machine = _machine()
    for entry in _entries(history_file(), (state.st_size, state.st_mtime_ns, state.st_ino)):
        try:
            if (entry["machine"], entry["stage"]) != (machine, stage):
                continue
            parts = entry["parts"] if "parts" in entry else {"start": 1.0, "macs": entry["work"]}
            parts = {str(name): float(amount) for name, amount in parts.items()}
            others, slower = map(float, entry.get("busy", (BUSY, 1.0)))
            seconds, memory = float(entry["seconds"]) / (slower if others >= BUSY else 1.0), entry.get("memory")
            pair = None if memory is None else (max(1, int(memory[0])), max(1, int(memory[1])))
            if math.isfinite(seconds) and all(map(math.isfinite, parts.values())):
                reused = bool(entry.get("reused"))
                yield Line(parts=parts, seconds=max(1e-3, seconds), reused=reused, busy=others, memory=pair)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
            continue  # written by something else


@lru_cache(maxsize=1)
def _entries(file: Path, state: tuple[int, int, int]) -> list[Any]:
    """Returns all lines of a file, read once for all steps of a plan as long as its state is the same."""
    entries = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entries.append(json.loads(line))
        except (ValueError, RecursionError):
            continue  # cut off by a kill
    return entries


def _machine() -> str:
    return digest(processor())[:16]
