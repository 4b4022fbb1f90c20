"""Timings under planted load: the speed-up of one engine over another beside that on the quiet machine, or the refusal.

    python benchmarks/busy_timings.py runs/sst2-minilm-ptq

takes the baseline in torch (fp32, eager) and the last variant in the first engine of a finished run, and times them as the latency step
does, at the smallest and the largest shape of the target, while other processes want 0, 0.5, 1 and 4 cores: one that computes for 50 of
every 100 ms, one and four that compute all the time. Repetitions go round through the loads, so that a slow phase affects all.
Prints for each load how many repetitions were given up (`busy`), and how far the others are from the median of the quiet ones; writes
`busy_timings.json`. Run it on a machine that does nothing else. It takes `--seconds` and at most one repetition more.

It passes (exit status 0) if no repetition is given up at 0.5 cores, at most 20 % are at 1, and what is not given up is within 15 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.report import evaluations
from compress.run.implicit import shapes
from export.engines.spec import EngineSpec, spec_of, torch_spec
from foundation.artifacts.run_folder import Run, open_run
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.machine.environment import fingerprint
from foundation.machine.load import Watch
from foundation.measure.latency import Shape, measure
from foundation.measure.race import Race, Rival
from foundation.measure.turns import ratio
from foundation.models.folder import Checkpoint
from parts.planted_load import load_of

LOADS = (0.0, 0.5, 1.0, 4.0)
ROUNDS = ((0.0, 0.5, 1.0), (0.5, 1.0), (0.0, 0.5, 1.0, 4.0), (0.5, 1.0))
"""Loads of successive rounds: the criteria at 0.5 and 1 need the most repetitions."""
WITHIN = 0.15
MOST_REFUSED = {0.0: 0.0, 0.5: 0.0, 1.0: 0.2, 4.0: 1.0}


def engines_of(run: Run) -> tuple[list[EngineSpec], list[Shape]]:
    """Returns the baseline in torch and the last variant in the first engine, and two shapes."""
    exported, target = run.of_kind("engine"), Target.model_validate(run.recipe["target"])
    if exported is None:
        raise SystemExit(f"{run.folder}: this run has no engines; give one whose recipe has the stage export")
    builds = evaluations.exported(run).builds
    last = next(build for build in builds if build.variant == list(run.variants)[-1])
    entry = next(entry for entry in last.engines if entry.runnable)
    baseline = run.artifacts[next(iter(run.variants))].path
    pair = [
        torch_spec(Checkpoint(baseline), exported.path / builds[0].folder, "fp32", target),
        spec_of(exported.path, last, entry, target),
    ]
    known = shapes(run.recipe["model"]["task"], target)
    return pair, [known[0], known[-1]]


def repetition(pair: Sequence[EngineSpec], wanted: Sequence[Shape], load: float) -> dict[str, Any]:
    """Returns the ratio at each shape, whether it is given up, and how busy the machine was."""
    race, watch = Race([Rival("reference", always=True), Rival("served", always=True)]), Watch()
    with load_of(load):
        rows = [row for _, row in measure(pair, wanted, ConsoleProgress("silent"), race, watch)]
    cells = [(rows[number], rows[number + len(wanted)]) for number in range(len(wanted))]
    found = [ratio(slow, fast) for slow, fast in cells]
    return {
        "load": load,
        "ratios": [one.value for one in found],
        "intervals": [[one.low, one.high] for one in found],
        "busy": [slow.busy or fast.busy for slow, fast in cells],
        "estimated": [slow.estimated or fast.estimated for slow, fast in cells],
        "rows": [row.written() for row in rows],
        "machine": watch.summary(),
    }


def summary(done: Sequence[dict[str, Any]], wanted: Sequence[Shape]) -> tuple[list[str], bool]:
    """Returns the table, and whether the criteria hold."""
    lines, passes = ["| cores | shape | n | given up | estimated | ratio, median | off the quiet one, worst |", "| --- " * 7 + "|"], True
    for number, (batch, length) in enumerate(wanted):
        quiet = float(np.median([one["ratios"][number] for one in done if one["load"] == 0.0]))
        for load in LOADS:
            mine = [one for one in done if one["load"] == load]
            if not mine:
                continue
            kept = [one["ratios"][number] for one in mine if not one["busy"][number]]
            refused, estimated = (sum(one[key][number] for one in mine) for key in ("busy", "estimated"))
            worst = max((abs(value / quiet - 1) for value in kept), default=0.0)
            passes &= refused <= MOST_REFUSED[load] * len(mine) and worst <= WITHIN
            middle = f"{np.median(kept):.2f}" if kept else "-"
            off = f"{100 * worst:.1f} %" if kept else "-"
            lines.append(f"| {load:g} | {batch} x {length} | {len(mine)} | {refused} | {estimated} | {middle} | {off} |")
    return lines, passes


def main() -> int:
    """Goes round through the loads until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run with the stage export")
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--json", type=Path, default=Path("busy_timings.json"))
    given = parser.parse_args()
    pair, wanted = engines_of(open_run(given.run))
    done: list[dict[str, Any]] = []
    started, number = time.monotonic(), 0
    while time.monotonic() - started < given.seconds:
        for load in ROUNDS[number % len(ROUNDS)]:
            if done and time.monotonic() - started > given.seconds:
                break
            done.append(repetition(pair, wanted, load))
            one = done[-1]
            ratios = " ".join(f"{value:.2f}{' busy' if busy else ''}" for value, busy in zip(one["ratios"], one["busy"], strict=True))
            print(
                f"{time.monotonic() - started:5.0f} s  load {load:g}  ratios {ratios}  other cores {one['machine']['other_cores']}",
                flush=True,
            )
        number += 1
    lines, passes = summary(done, wanted)
    print("\n".join(lines))
    given.json.write_text(json.dumps({"fingerprint": fingerprint(), "repetitions": done}, indent=1), encoding="utf-8")
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
