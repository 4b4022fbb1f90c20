"""What happens when machines, links and disks fail during a training on two nodes, and after how many seconds.

    python benchmarks/training/failures.py [--cases killed cut ...] [--epochs 3]

Two network namespaces, which a veth pair joins, are the nodes: each has a process, a hostname and a folder for temporary files of its own.
Takes root. Every case starts a training, lets something fail, and starts it again; the result is compared with a training that nothing
disturbed. Prints a Markdown table. The machine should have little else to do: how long a step takes decides when a slow process is named.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import node_failures as cases
from tests.nodes import why_none

HOURS = 3600.0


def main() -> None:
    """Runs the cases and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    if reason := why_none():
        sys.exit(f"no nodes can be made here: {reason}")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        setup = cases.Setup(Path(folder), epochs=options.epochs, join_s=20.0)
        os.environ["XDG_CACHE_HOME"] = str(setup.folder / "cache")
        whole = cases.undisturbed(setup)
        table: dict[str, Callable[[], cases.Seen]] = {
            "killed": lambda: cases.killed(setup, whole),
            "first killed": lambda: cases.killed(setup, whole, first=True),
            "killed, torchrun restarts": lambda: cases.returned(setup, whole),
            "link cut": lambda: cases.cut(setup, whole),
            "link cut for 20 s": lambda: cases.blinked(setup, whole),
            "slow": lambda: cases.slow(setup),
            "stopped": lambda: cases.stopped(setup),
            "disk full": lambda: cases.full(setup, whole),
            "clock 5 h ahead": lambda: cases.apart(setup, whole, 5 * HOURS),
            "clock 5 h behind": lambda: cases.apart(setup, whole, -5 * HOURS),
            "second never comes": lambda: cases.missing(setup, first=True),
            "first never comes": lambda: cases.missing(setup, first=False),
        }
        print("| case | seconds | goes on | equal bits | lines |\n| --- | --- | --- | --- | --- |", flush=True)
        for name in options.cases or table:
            seen = table[name]()
            lines = "<br>".join(f"{host}: {line}" for host, found in seen.lines.items() for line in found)
            print(f"| {name} | {seen.seconds:.1f} | {seen.goes_on} | {seen.equal} | {lines} |", flush=True)


if __name__ == "__main__":
    main()
