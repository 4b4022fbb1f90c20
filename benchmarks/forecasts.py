"""What `compress plan` predicts beside what the run takes: seconds, memory and disk space of every step.

    python benchmarks/forecasts.py runs/forecasts recipes/quickstart.yaml "recipes/sst2-minilm-ptq.yaml model.path=FOLDER data.path=FOLDER"

Each argument after the first is a recipe with its settings. Every recipe is planned and then run once, in an empty cache folder: nothing is
known of the machine but its measured speed. When all have run, each is planned again as if the others alone had run on this machine before.
Prints a table of the steps and of the totals; writes `forecasts.json`. A figure is `predicted / taken`. Run it on a machine that does
nothing else.

It passes (exit status 0) if every total, and every step of more than a second, is within a factor of 1.5, first plan and later one alike.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foundation.machine.environment import cache_folder, fingerprint

WITHIN = 1.5
SHORT_S = 1.0
"""Steps that take less are shown, and not judged."""
ENDED = (0, 3, 4)
"""Exit statuses of a run that went to its end: goals met, missed, not judged."""


def environment(cache: Path) -> dict[str, str]:
    """Returns the environment of a process that uses this cache folder, with the server environments of the user's own."""
    cache.mkdir(parents=True, exist_ok=True)
    for server in cache_folder().glob("server-*"):
        link = cache / "compress" / server.name
        link.parent.mkdir(exist_ok=True)
        if not link.exists():
            link.symlink_to(server)
    return {**os.environ, "XDG_CACHE_HOME": str(cache)}


def planned(recipe: str, settings: Sequence[str], folder: Path, cache: Path) -> list[dict[str, Any]]:
    """Returns the predictions of a plan that is made in a process of its own."""
    command = [sys.executable, __file__, "--plan", str(folder), recipe, *settings]
    done = subprocess.run(command, env=environment(cache), check=True, capture_output=True, text=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def print_plan(folder: Path, recipe: str, settings: Sequence[str]) -> None:
    """Prints the predictions as a line of JSON."""
    from compress.api import load_recipe
    from compress.commands.plan import plan

    steps = plan(load_recipe(recipe, settings), folder).steps
    times = [(step.expected.low, step.expected.seconds, step.expected.high) for step in steps]
    known = ({"id": step.id, "disk": step.disk_bytes, "memory": step.memory_bytes} for step in steps)
    print(json.dumps([{**one, "seconds": time} for one, time in zip(known, times, strict=True)]))


def taken(folder: Path, cache: Path) -> list[dict[str, Any]]:
    """Returns what the steps of a finished run took, from the records that the next plan would use."""
    from foundation.artifacts.run_folder import open_run

    entries = [json.loads(line) for line in (cache / "compress" / "times.jsonl").read_text(encoding="utf-8").splitlines()]
    folders = [artifact.path for artifact in open_run(folder).artifacts.values()]
    sizes = [sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in folders]
    pairs = zip(entries, sizes, strict=True)
    return [{"seconds": entry["seconds"], "memory": (entry.get("memory") or (0, 0))[1], "disk": size} for entry, size in pairs]


def measured(name: str, recipe: str, settings: Sequence[str], out: Path) -> dict[str, Any]:
    """Plans and runs a recipe in new folders."""
    folder, cache = out / name, out / f"{name}-cache"
    for old in (folder, cache):
        shutil.rmtree(old, ignore_errors=True)
    first = planned(recipe, settings, folder, cache)
    command = [str(Path(sys.executable).with_name("compress")), "run", recipe, "--out", str(folder), "--quiet"]
    for setting in settings:
        command += ["--set", setting]
    started = time.monotonic()
    done = subprocess.run(command, env=environment(cache), capture_output=True, text=True)
    wall = time.monotonic() - started
    if done.returncode not in ENDED:
        raise SystemExit(f"{name}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return {"name": name, "recipe": recipe, "settings": list(settings), "first": first, "taken": taken(folder, cache), "wall_s": wall}


def replanned(runs: Sequence[dict[str, Any]], number: int, out: Path) -> list[dict[str, Any]]:
    """Plans a recipe with the records of all other runs."""
    mine, cache = runs[number], out / "later-cache"
    shutil.rmtree(cache, ignore_errors=True)
    caches = [out / f"{run['name']}-cache" / "compress" for run in runs]
    shutil.copytree(caches[number] / "speed", cache / "compress" / "speed")
    others = [(folder / "times.jsonl").read_text(encoding="utf-8") for folder in (*caches[:number], *caches[number + 1 :])]
    (cache / "compress" / "times.jsonl").write_text("".join(others), encoding="utf-8")
    return planned(mine["recipe"], mine["settings"], out / "later", cache)


def table(runs: Sequence[dict[str, Any]]) -> tuple[list[str], bool]:
    """Returns the table, and whether the criteria hold."""
    lines = ["| run | step | taken, s | first plan | later plan | memory, MB | first plan | disk, MB | first plan |", "| --- " * 9 + "|"]
    passes = True
    for run in runs:
        for step, later, actual in zip(run["first"], run["later"], run["taken"], strict=True):
            ratios = [plan["seconds"][1] / actual["seconds"] for plan in (step, later)]
            passes &= actual["seconds"] < SHORT_S or all(1 / WITHIN <= ratio <= WITHIN for ratio in ratios)
            sizes = list(_sizes(step, actual))
            lines.append(
                f"| {run['name']} | {step['id']} | {actual['seconds']:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {' | '.join(sizes)} |"
            )
        total = sum(actual["seconds"] for actual in run["taken"])
        ratios = [sum(step["seconds"][1] for step in run[key]) / total for key in ("first", "later")]
        passes &= all(1 / WITHIN <= ratio <= WITHIN for ratio in ratios)
        lines.append(f"| **{run['name']}** | total | {total:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} | | | | |")
    return lines, passes


def _sizes(step: dict[str, Any], actual: dict[str, Any]) -> Iterator[str]:
    """Yields MB taken, and the predicted share of it, of memory and disk."""
    for key in ("memory", "disk"):
        yield f"{actual[key] / 1e6:.1f}"
        yield f"{step[key] / actual[key]:.2f}" if actual[key] else "-"


def main() -> int:
    """Runs the recipes one after the other; those that were run before are left out."""
    if sys.argv[1:2] == ["--plan"]:
        print_plan(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("recipes", nargs="+", help="a recipe, then settings KEY=VALUE")
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    runs = []
    for number, text in enumerate(given.recipes):
        recipe, *settings = shlex.split(text)
        runs.append(measured(f"{number}-{Path(recipe).stem}", recipe, settings, out))
        print(f"{runs[-1]['name']}: {runs[-1]['wall_s']:.0f} s", flush=True)
    for number, run in enumerate(runs):
        run["later"] = replanned(runs, number, out)
    lines, passes = table(runs)
    print("\n".join(lines))
    (out / "forecasts.json").write_text(json.dumps({"fingerprint": fingerprint(), "runs": runs}, indent=1), encoding="utf-8")
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
