"""The latency step of one run, repeated: what is served and how fast it is said to be, alone and next to planted load.

    python benchmarks/repeated_runs.py runs/repeated recipes/quickstart.yaml --set stages.triton_repo.serve=false

runs a recipe to its end, and then ten times for each load everything from the latency step on, as `compress run --from latency` does. The
loads take turns: other processes want 0 or 0.5 cores. Prints a line for each repetition and a table; writes `repeated_runs.json` after
each, and a later call goes on from there. Run it on a machine that does nothing else.

It passes (exit status 0) if every repetition serves the same, and no speed-up is further than 15 % from the median without load.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from compress.report.document import Report
from foundation.machine.environment import fingerprint
from parts.planted_load import load_of

WITHIN = 0.15
ENDED = (0, 3, 4)
"""Exit statuses of a run that went to its end: goals met, missed, not judged."""


@dataclass(frozen=True)
class Repetition:
    """What a repetition says."""

    load: float
    served: str
    """Variant, engine, mode and precisions."""
    size_bytes: int | None
    speedup: float | None
    low: float | None
    high: float | None
    busy: int
    """Latencies that goals are not judged on."""
    rows: int
    latency_s: float
    """Seconds of the latency step."""
    status: int


def repetition(command: Sequence[str], folder: Path, load: float) -> Repetition:
    """Runs the recipe from the latency step on."""
    with load_of(load):
        done = subprocess.run([*command, "--from", "latency"], capture_output=True, text=True)
    if done.returncode not in ENDED:
        raise SystemExit(f"exit status {done.returncode}\n{done.stderr[-2000:]}")
    report = Report.load(folder)
    decision, timings = report.decision, report.contents.timings
    served = decision.served
    assert served is not None
    assert timings is not None
    named = f"{served.variant} {served.engine} {served.mode} {served.precision}/{served.float_precision}"
    seconds = float(timings.machine.seconds or 0.0)
    speedup = decision.speedup
    return Repetition(
        load, named, decision.size_bytes, speedup.value, speedup.low, speedup.high, timings.busy, timings.rows, seconds, done.returncode
    )


def table(done: Sequence[Repetition], loads: Sequence[float]) -> tuple[list[str], bool]:
    """Returns the table, and whether the criteria hold."""
    quiet = statistics.median(one.speedup for one in done if one.load == loads[0] and one.speedup is not None)
    lines = ["| cores | n | speed-up, median | lowest | highest | refused | served | latency step, s |", "| --- " * 8 + "|"]
    for load in loads:
        mine = [one for one in done if one.load == load]
        stated = [one.speedup for one in mine if one.speedup is not None]
        choices = collections.Counter(one.served for one in mine)
        named = "; ".join(f"{name} ({count})" for name, count in choices.most_common())
        figures = [f"{f(stated):.2f}" if stated else "-" for f in (statistics.median, min, max)]
        seconds = statistics.median(one.latency_s for one in mine)
        lines.append(f"| {load:g} | {len(mine)} | {' | '.join(figures)} | {len(mine) - len(stated)} | {named} | {seconds:.0f} |")
    within = all(one.speedup is None or abs(one.speedup / quiet - 1) <= WITHIN for one in done)
    return lines, within and len({one.served for one in done}) == 1


def main() -> int:
    """Runs the recipe, then repeats its latency step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the run folder")
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.0, 0.5])
    given = parser.parse_args()
    command = [str(Path(sys.executable).with_name("compress")), "run", given.recipe, "--out", str(given.out), "--quiet"]
    for setting in given.set:
        command += ["--set", setting]
    first = subprocess.run(command, capture_output=True, text=True)
    if first.returncode not in ENDED:
        raise SystemExit(f"exit status {first.returncode}\n{first.stderr[-2000:]}")
    written = Path(given.out, "repeated_runs.json")
    done = [Repetition(**one) for one in json.loads(written.read_text(encoding="utf-8"))["repetitions"]] if written.exists() else []
    for _ in range(given.times):
        for load in given.loads:
            if sum(one.load == load for one in done) >= given.times:
                continue
            started = time.monotonic()
            done.append(repetition(command, given.out, load))
            one = done[-1]
            value = "-" if one.speedup is None else f"{one.speedup:.2f} ({one.low or 0:.2f} to {one.high or 0:.2f})"
            print(f"load {load:g}  {value}  busy {one.busy} of {one.rows}  {one.served}  {time.monotonic() - started:.0f} s", flush=True)
            contents = {"fingerprint": fingerprint(), "repetitions": [asdict(each) for each in done]}
            written.write_text(json.dumps(contents, indent=1), encoding="utf-8")
    lines, passes = table(done, given.loads)
    print("\n".join(lines))
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
