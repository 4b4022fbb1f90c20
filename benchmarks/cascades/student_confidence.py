"""Students before and after a training for the cascade: how well the margin of each ranks the rows that the original answers otherwise.

    python benchmarks/cascades/student_confidence.py RUN --before small --after more sure [--bound 0.01] [--draws N]

RUN is a finished run of a task whose answers are classes; small, more and sure are ids of its variants. Predictions are those of torch on
the evaluation rows, the original's in fp32.

    AUROC, AURC     of the margin (`foundation.measure.selective`): the larger, the smaller is better
    goes on         least share of the rows, the least sure first, that the original has to answer so that at most `--bound` of all rows are
                    kept and answered otherwise
    in brackets     95 % interval of the difference to `--before`: paired bootstrap over rows, N draws
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from foundation.artifacts.run_folder import open_run
from foundation.core.arrays import Array
from foundation.labels.tasks import TASKS
from foundation.measure.answers import load_logits
from foundation.measure.selective import aurc, auroc
from foundation.standalone.confidence import NAMES, features

SEED = 0


def goes_on(scores: Array, wrong: Array, bound: float) -> float:
    """Returns the least share of rows, the least sure first, without which at most `bound` of all rows are answered otherwise.

    Args:
        scores: Larger is surer, float64 [n].
        wrong: bool [n].
        bound: Share of all rows.
    """
    order = np.argsort(-scores, kind="stable")
    errors = np.concatenate([[0], np.cumsum(wrong[order])])
    ends = np.concatenate([[True], np.diff(scores[order]) != 0, [True]])  # equal rows are kept together
    return 1 - float(np.flatnonzero((errors <= bound * len(wrong)) & ends).max()) / len(wrong)


def interval(figure: Callable[[Array, Array], float | None], one: tuple[Array, Array], other: tuple[Array, Array], draws: int) -> str:
    """Returns the 95 % interval of the difference of a figure between two students, each with scores and wrong rows, [n] both."""
    rng, n, found = np.random.default_rng(SEED), len(one[0]), []
    for _ in range(draws):
        rows = rng.integers(0, n, n)
        values = [figure(scores[rows], wrong[rows]) for scores, wrong in (one, other)]
        if None not in values:
            found.append(float(values[0] or 0) - float(values[1] or 0))
    low, high = np.quantile(found, (0.025, 0.975))
    return f"{low:+.4f} to {high:+.4f}"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--before", required=True)
    parser.add_argument("--after", nargs="+", required=True)
    parser.add_argument("--bound", type=float, default=0.01)
    parser.add_argument("--draws", type=int, default=2000)
    given = parser.parse_args()
    run = open_run(given.run)
    task = run.recipe["model"]["task"]
    if TASKS[task].answer.CONFIDENCE != "class":
        raise SystemExit(f"{given.run}: a run of {task}; give one whose answers are classes")
    unknown = [name for name in (given.before, *given.after) if name not in run.variants]
    if unknown:
        raise SystemExit(f"{given.run}: no variant {unknown[0]}; it has {', '.join(run.variants)}")
    original = load_logits(run.predictions(run.baseline))
    known = {}
    for name in (given.before, *given.after):
        logits = load_logits(run.predictions(name))
        known[name] = features(logits, "class")[:, NAMES.index("margin")], TASKS[task].answer.other_rows(original, logits)
    figures: tuple[Callable[[Array, Array], float | None], ...] = (auroc, aurc, lambda scores, wrong: goes_on(scores, wrong, given.bound))
    print(f"{run.recipe['name']}, {len(original)} evaluation rows\n")
    print(f"| student | other answers | AUROC | AURC | goes on at {given.bound:.1%} |")
    print("| --- " * 5 + "|")
    for name, (scores, wrong) in known.items():
        cells = []
        for figure in figures:
            value = figure(scores, wrong)
            cell = "none" if value is None else f"{value:.4f}"
            if name != given.before and value is not None:
                cell += f" ({interval(figure, (scores, wrong), known[given.before], given.draws)})"
            cells.append(cell)
        print(f"| {name} | {wrong.mean():.2%} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
