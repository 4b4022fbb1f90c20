"""The report of `make gpu-check`: every verdict, and every figure behind it.

gpu-check/report.json    measurements and verdicts
gpu-check/report.md      the table, for readers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compress.artifacts.artifact import write_json, write_text
from triton_repo.gpu.check.verdicts import Verdict, passes, verdicts

JSON, MARKDOWN, SCHEMA = "report.json", "report.md", 1


def write_report(folder: Path, machine: Mapping[str, Any], models: Mapping[str, Any]) -> list[Verdict]:
    """Writes both files and returns the verdicts.

    Args:
        folder: Folder to write into.
        machine: `gpus` (names), `driver`, `release`, `versions`.
        models: What was measured, by name of the recipe (`triton_repo.gpu.check.verdicts`).
    """
    lines = verdicts(models)
    listed = [{**asdict(line), "verdict": line.word} for line in lines]
    write_json(folder / JSON, {"schema": SCHEMA, "passed": passes(lines), "machine": machine, "models": models, "verdicts": listed})
    write_text(folder / MARKDOWN, markdown(machine, models, lines))
    return lines


def markdown(machine: Mapping[str, Any], models: Mapping[str, Any], lines: Sequence[Verdict]) -> str:
    """Returns the report for readers."""
    rows = "\n".join(f"| {line.model} | {line.line} | {_number(line.value)} | {_limit(line)} | {_verdict(line)} |" for line in lines)
    timed = "\n".join(_latency(name, found) for name, found in models.items())
    names = ", ".join(f"{machine['gpus'].count(name)} x {name}" for name in dict.fromkeys(machine["gpus"]))
    counts = {word: sum(line.word == word for line in lines) for word in ("passed", "missed", "not measured", "told")}
    return f"""# GPU check: {"passed" if passes(lines) else "not passed"}

{names}; driver {machine["driver"]}; NVIDIA's images {machine["release"]}. {", ".join(f"{count} {word}" for word, count in counts.items())}.

| model | line | measured | asked for | verdict |
| --- | --- | --- | --- | --- |
{rows}

## Latency of the plans

Milliseconds for a batch that lies on the GPU, p50, int8 and fp16 in turns, measured by `build_plans.py` in the container.

| model | GPU | batch x sequence | int8 | float | ratio |
| --- | --- | --- | --- | --- | --- |
{timed}
"""


def _latency(name: str, found: Mapping[str, Any]) -> str:
    lines = []
    for capability, plan in sorted(found["plans"].items()):
        for row in plan["latency"]:
            rival = "" if row["rival"] is None else f"{row['rival']['p50_ms']:.3f} ({plan['rival']['precision']})"
            shape = f"{row['batch']} x {row['sequence'] or 'image'}"
            lines.append(f"| {name} | sm{capability} | {shape} | {row['plan']['p50_ms']:.3f} | {rival} | {_number(row['speedup'])} |")
    return "\n".join(lines) or f"| {name} | | no plan was built | | | |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _limit(line: Verdict) -> str:
    return "" if line.limit is None else f"{'at most' if line.at_most else 'at least'} {line.limit:g}"


def _verdict(line: Verdict) -> str:
    word = f"**{line.word}**" if line.word in ("missed", "not measured") else line.word
    return word if line.reason is None else f"{word}: {line.reason}"
