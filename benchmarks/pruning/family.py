"""A family of MiniLM on SST-2 from one gradual training: speed, accuracy and time of each member, and of one model pruned at once.

    python benchmarks/pruning/family.py --model FOLDER --data FOLDER [--passes P] [--at-once S] [--set KEY=VALUE ...] [--out FOLDER]

The first FOLDER holds MiniLM fine-tuned on SST-2, the second the SST-2 files that recipes/sst2-minilm-ptq-2693.yaml names. Members have
2, 3 and 5 times the speed of the unpruned model in int8 and P passes over the train split together. With `--at-once S` the unpruned model
is also pruned to S times its speed in one cut, with all P passes, in the same run. Prints a table: the speed-up over the unpruned model
in int8, as the engines took turns, accuracy over the evaluation split with its 95 % interval, steps of the optimizer and seconds of the
stage. Resumes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from compress.pipeline import run
from compress.recipe import read
from compress.report.model.contents import Contents
from compress.report.variant_goals import speedup_over
from foundation.core.progress import ConsoleProgress
from foundation.machine.environment import fingerprint

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = (2, 3, 5)
WHOLE = "quantize-1x"


def main() -> None:
    """Runs the recipe and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="fine-tuned MiniLM")
    parser.add_argument("--data", type=Path, required=True, help="SST-2 folder")
    parser.add_argument("--passes", type=float, default=6.0, help="passes over the train split of the whole family")
    parser.add_argument("--at-once", type=float, help="speed-up of a model that is pruned in one cut")
    parser.add_argument("--set", action="append", default=[], help="key.path=value, as for compress run")
    parser.add_argument("--out", type=Path, default=Path("runs/family"), help="where to work")
    arguments = parser.parse_args()
    stages = stages_of(arguments.passes, arguments.at_once)
    settings = [f"model.path={arguments.model}", f"data.path={arguments.data}", f"stages={json.dumps(stages)}", "target.engines=[openvino]"]
    settings += ["target.batch_sizes=[8]", "target.sequence_lengths=[128]", "goals={max_drop: 1.0}"]
    recipe = read(ROOT / "recipes" / "sst2-minilm-ptq-2693.yaml", [*settings, *arguments.set])
    outcome = run(recipe, arguments.out, progress=ConsoleProgress())
    print(table(outcome.contents, outcome.report))
    print(json.dumps(fingerprint(), default=str))


def stages_of(passes: float, at_once: float | None) -> list[dict[str, Any]]:
    """Returns the stages: the family, the model that is pruned at once if there is one, and the int8 of each."""
    recover = {"epochs": passes, "learning_rate": 5e-5, "hidden_weight": 1.0}
    shared = {"measure": "latency", "rows": 256, "recover": recover}
    stages: list[dict[str, Any]] = [{"prune": {**shared, "family": [1, *MEMBERS]}}, {"quantize": {}}]
    if at_once is not None:
        stages += [{"prune": {**shared, "id": "once", "input": "baseline", "speedup": at_once}}, {"quantize": {"id": "quantize-once"}}]
    return [*stages, {"export": {}}]


def table(contents: Contents, report: dict[str, Any]) -> str:
    """Returns the Markdown table."""
    stages = {stage["id"]: stage for stage in report["stages"]}
    variants = {variant["id"]: variant for variant in report["variants"]}
    lines = ["| model | parameters | speed-up in int8 | accuracy in torch | accuracy in int8 | steps | seconds |", "|" + " --- |" * 7]
    for name, variant in variants.items():
        if not name.startswith("quantize"):
            continue
        pruned = f"prune-{name.removeprefix('quantize-')}" if name != "quantize-once" else "once"
        floating = variants.get(pruned, variants["baseline"])
        faster = speedup_over(contents, name, WHOLE)
        steps = sum(step.get("steps") or 0 for step in (floating.get("pruning") or {}).get("steps", []))
        seconds = stages[pruned]["seconds"] if pruned in stages else 0
        cell = variant["accuracy"]["openvino"]
        speed = "not measured" if faster.value is None else f"{faster.value:.2f}x"
        speed += f" ({faster.low:.2f} to {faster.high:.2f})" if faster.low is not None and faster.high is not None else ""
        accuracy = f"{cell['value']:.4f} ({cell['low']:.4f} to {cell['high']:.4f}), n = {cell['n']}"
        torch = f"{floating['accuracy']['torch']['value']:.4f}"
        lines.append(f"| {name} | {variant['parameters']:,} | {speed} | {torch} | {accuracy} | {steps} | {seconds:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
