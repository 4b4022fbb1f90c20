"""How long threads of torch should spin while they wait for each other: calls of a small encoder with several spin counts of libgomp.

    python benchmarks/spin_count.py runs/sst2-minilm-ptq

times the baseline of a finished run in torch (fp32, eager, the threads of the target) at the smallest shape, on the machine as it is and
beside one process that computes all the time. The counts take turns. Prints the medians of wall and processor time.
`foundation.machine.waits` holds the count that is used. Run it on a machine that does nothing else; it takes about two minutes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
from busy_timings import engines_of, load_of

from foundation.artifacts.run_folder import open_run
from foundation.measure.engine_process import EngineProcess

COUNTS = ("0", "1000", "3000", "5000", "10000", "300000")
"""300,000 is the default of libgomp."""
TURNS = 3
LOADS = (0.0, 1.0)


def main() -> None:
    """Times every count under every load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run with the stage export")
    pair, wanted = engines_of(open_run(parser.parse_args().run))
    batch, sequence = wanted[0]
    walls: dict[tuple[str, float], list[float]] = {}
    times: dict[tuple[str, float], list[float]] = {}
    for _ in range(TURNS):
        for count in COUNTS:
            os.environ["GOMP_SPINCOUNT"] = count
            with EngineProcess(pair[0]) as process:
                for load in LOADS:
                    with load_of(load):
                        found = process.ask("measure", batch=batch, sequence=sequence, least=3, most=60, seconds=0.5)
                    walls.setdefault((count, load), []).extend(found["samples_ms"])
                    times.setdefault((count, load), []).extend(found["cpu_ms"])
    print(f"{pair[0].threads} threads, batch {batch} x {sequence}; medians over {TURNS} turns")
    print("| spin count | ms, no other load | ms, 1 core of load | processor ms, no other load | processor ms, 1 core |")
    print("| --- " * 5 + "|")
    for count in COUNTS:
        cells = [f"{np.median(table[count, load]):.1f}" for table in (walls, times) for load in LOADS]
        print(f"| {count} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
