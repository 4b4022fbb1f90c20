"""Certificates of cascades against a known truth: how often the bound is broken, and how much of it is used.

    python benchmarks/cascades/cascade_certificates.py RUN [RUN ...] [--draws N] [--seed N]

RUN is a finished run. With a stage `cascade` the pool are its certificate rows and the evaluation rows, the tiers, scores and the path are
those of the stage, and the path was fixed on its selection rows. Of other runs the last variant in int8 stands before the baseline in fp32,
each in its first engine; a random third of the evaluation rows fixes the score and the path, the others are the pool.

The pool is the truth. For each bound and confidence, certificate rows are drawn from the pool with replacement, N times; the stage's tests
choose a point of the path, whose share of other answers in the pool is then compared with the bound. Printed are the share of draws
that are above the bound, with its exact 95 % interval, the mean share of other answers over the bound, and the mean share of rows that the
last tier answers. Exit status 1 where an interval lies above 1 - confidence as a whole, or where less than 0.6 of a bound is used that the
first tier alone exceeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import bdtr

from compress.report import evaluations
from export.cascade.certificate import fixed_sequence, upper_limit
from export.cascade.losses import form_of
from export.cascade.path import Seen, Thresholds, path
from export.cascade.scores import Judged, choose
from export.cascade.stored import load
from export.cascade.tested import Answers, fastest
from foundation.artifacts.exported import Build
from foundation.artifacts.run_folder import Run, open_run
from foundation.core.arrays import Array
from foundation.measure.answers import load_logits

CELLS = ((0.005, 3638), (0.01, 1819), (0.02, 909))
"""A bound, and how many rows are drawn for it: enough to use 0.6 of it."""
CONFIDENCES = (0.9, 0.95)
LEAST_USED = 0.6


@dataclass(frozen=True)
class Pool:
    """Rows whose truth is known, and a path that other rows fixed."""

    name: str
    about: str
    seen: Seen
    points: Sequence[tuple[float | None, ...]]
    times_ms: Sequence[float]
    """Mean time of a row at each point, on the rows that fixed the path."""


def pool_of(folder: Path, seed: int) -> Pool:
    """Returns the pool of a run."""
    run = open_run(folder)
    task, found = str(run.recipe["model"]["task"]), evaluations.cascade(run)
    made, exported = run.of_kind("cascade"), run.of_kind("engine")
    if exported is None:
        raise SystemExit(f"{folder}: this run has no engines; give one whose recipe has the stage export")
    original = load_logits(run.predictions(run.baseline))
    builds = evaluations.exported(run).builds
    points: list[Thresholds] = []
    if found is not None and made is not None:
        entries = [next(one for build in builds for one in build.engines if build.key(one) == tier.key) for tier in found.tiers]
        evaluated = [load_logits(exported.path / str(one.predictions)) for one in entries]
        limit = found.certificate.distance
        chosen_on, _ = load(made.path / found.certificate.path.predictions, task, limit)
        certified, _ = load(made.path / found.certificate.predictions, task, limit)
        both = [np.concatenate([one, other]) for one, other in zip(certified.tiers, evaluated, strict=True)]
        pool = Answers(task, np.concatenate([certified.original, original]), both, limit=limit)
        scores = [tier.score.score for tier in found.tiers if tier.score is not None]
        costs, names = [float(tier.cost_ms) for tier in found.tiers], [tier.variant for tier in found.tiers]
        points = [point.thresholds for point in found.certificate.path.points]
    else:
        last, first = _build(run, builds, quantized=True), _build(run, builds, quantized=False)
        logits = [
            load_logits(exported.path / str(next(one for one in build.engines if one.runnable).predictions)) for build in (last, first)
        ]
        rows = np.random.default_rng(seed).permutation(len(original))
        some, rest = rows[: len(rows) // 3], rows[len(rows) // 3 :]
        chosen_on = Answers(task, original[some], [one[some] for one in logits])
        pool = Answers(task, original[rest], [one[rest] for one in logits])
        judged = Judged(logits[0][some], original[some], ~chosen_on.wrong(0), form_of(task, str(folder)))
        scores, costs, names = [choose(judged, "auto", "score")[0]], [1.0, 3.0], [last.variant, first.variant]
    known = chosen_on.seen(scores, costs)
    points = points or path(known)
    alone = ", ".join(f"{name} {pool.wrong(number).mean():.2%}" for number, name in enumerate(names))
    how = ", ".join(score["name"] for score in scores)
    about = f"{len(pool.original)} rows, path of {len(points)} points from {len(chosen_on.original)} others, {how}"
    about += f"; other answers alone: {alone}"
    return Pool(str(run.recipe["name"]), about, pool.seen(scores, costs), points, [known.time_ms(point) for point in points])


def _build(run: Run, builds: Sequence[Build], *, quantized: bool) -> Build:
    """Returns the last quantized build, or that of the baseline in fp32."""
    wanted = [build for build in builds if (build.precision.startswith("int8") if quantized else build.variant == run.baseline)]
    fitting = [build for build in wanted if quantized or build.precision == "fp32"]
    if not fitting:
        raise SystemExit(f"{run.folder}: this run has no {'int8' if quantized else 'fp32'} build")
    return fitting[-1]


def drawn(pool: Pool, n: int, bound: float, confidence: float, draws: int, seed: int) -> tuple[Array, int]:
    """Returns the points that were chosen, int64 `[draws]` without draws in which none was, and how many those are."""
    losses = np.stack([pool.seen.losses(point) for point in pool.points]).astype(np.float32)
    rng, size = np.random.default_rng(seed), losses.shape[1]
    chosen = []
    for _ in range(draws):
        counts = np.bincount(rng.integers(0, size, n), minlength=size).astype(np.float32)
        p_values = bdtr((losses @ counts).round().astype(np.float64), n, bound)
        last = fixed_sequence(p_values.tolist(), 1 - confidence)
        chosen.append(-1 if last is None else fastest(pool.times_ms[: last + 1]))
    found = np.array(chosen)
    return found[found >= 0], int((found < 0).sum())


def main() -> int:
    """Prints a table for each run; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="finished run")
    parser.add_argument("--draws", type=int, default=1000, help="draws of certificate rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    arguments = parser.parse_args()
    status = 0
    for folder in arguments.runs:
        pool = pool_of(folder, arguments.seed)
        risks = np.array([pool.seen.losses(point).mean() for point in pool.points])
        beyond = np.array([(pool.seen.answering(point) == len(pool.seen.scores)).mean() for point in pool.points])
        print(
            f"\n{pool.name}: {pool.about}\n\n| bound | confidence | n | above the bound | 95 % interval | used | last tier | no cascade |"
        )
        print("| --- " * 8 + "|")
        for bound, n in CELLS:
            for confidence in CONFIDENCES:
                chosen, none = drawn(pool, n, bound, confidence, arguments.draws, arguments.seed)
                above = int((risks[chosen] > bound).sum())
                low = 1 - upper_limit(arguments.draws - above, arguments.draws, 0.025)
                high = upper_limit(above, arguments.draws, 0.025)
                used = float(risks[chosen].mean() / bound) if len(chosen) else 0.0
                share = f"{beyond[chosen].mean():.1%}" if len(chosen) else ""
                cells = f"{above / arguments.draws:.1%} | {low:.1%} to {high:.1%} | {used:.2f} | {share} | {none}"
                print(f"| {bound:.1%} | {confidence:g} | {n} | {cells} |", flush=True)
                status |= int(low > 1 - confidence or (used < LEAST_USED and risks[-1] > bound))
    return status


if __name__ == "__main__":
    sys.exit(main())
