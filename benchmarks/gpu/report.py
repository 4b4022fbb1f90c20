"""The report of `make gpu-check`: every verdict, and every figure behind it.

gpu-check/report.json    measurements and verdicts
gpu-check/report.md      the table, for readers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.verdict import Verdict, passes
from benchmarks.gpu.verdicts import verdicts
from foundation.artifacts.artifact import write_json, write_text
from foundation.core.engines import served_on

JSON, MARKDOWN, SCHEMA = "report.json", "report.md", 1


def write_report(folder: Path, machine: Mapping[str, Any], models: Mapping[str, Any], kernels: Mapping[str, Any]) -> list[Verdict]:
    """Writes both files and returns the verdicts.

    Args:
        folder: Folder to write into.
        machine: `gpus` (names), `driver`, `release`, `command`, `versions` by name, `clocks` (`benchmarks.gpu.clocks`).
        models: What was measured, by name of the recipe (`benchmarks.gpu.verdicts`).
        kernels: What was measured of our own kernels (`benchmarks.gpu.kernel_verdicts`).
    """
    lines = verdicts(models, kernels)
    listed = [{**asdict(line), "verdict": line.word} for line in lines]
    document = {"schema": SCHEMA, "passed": passes(lines), "machine": machine, "models": models, "kernels": kernels, "verdicts": listed}
    write_json(folder / JSON, document)
    write_text(folder / MARKDOWN, markdown(machine, models, kernels, lines))
    return lines


def markdown(machine: Mapping[str, Any], models: Mapping[str, Any], kernels: Mapping[str, Any], lines: Sequence[Verdict]) -> str:
    """Returns the report for readers."""
    rows = "\n".join(f"| {line.model} | {line.line} | {_number(line.value)} | {_limit(line)} | {_verdict(line)} |" for line in lines)
    timed = "\n".join(_latency(name, found) for name, found in models.items())
    names = ", ".join(f"{machine['gpus'].count(name)} x {name}" for name in dict.fromkeys(machine["gpus"]))
    counts = {word: sum(line.word == word for line in lines) for word in ("passed", "missed", "not measured", "told")}
    return f"""# GPU check: {"passed" if passes(lines) else "not passed"}

{names}; driver {machine["driver"]}; NVIDIA's images {machine["release"]}. {", ".join(f"{count} {word}" for word, count in counts.items())}.

{_conditions(machine, models, kernels)}

| model | line | measured | asked for | verdict |
| --- | --- | --- | --- | --- |
{rows}

## Latency of the plans

Milliseconds for a batch that lies on the GPU, p50, int8 and fp16 in turns, measured by `build_plans.py` in the container. Where the last
column has a time, the others are those of CUDA graphs.

| model | GPU | batch x sequence | int8 | float | ratio | int8, kernel by kernel |
| --- | --- | --- | --- | --- | --- | --- |
{timed}
"""


def _conditions(machine: Mapping[str, Any], models: Mapping[str, Any], kernels: Mapping[str, Any]) -> str:
    """Returns the command, versions, clocks and peak behind the figures, as a list."""
    library = served_on("cuda")[0]  # a plan records its version under its name
    built = sorted({plan[library] for found in models.values() for plan in found["plans"].values()})
    versions = {**machine["versions"], **kernels.get("versions", {}), **({f"{library} in the image": ", ".join(built)} if built else {})}
    lines = [f"- Command: `{machine['command']}`", f"- Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}"]
    for clock in machine["clocks"]:
        lines.append(f"- Clocks of GPU {clock['gpu']} in {clock['seconds']} s of work: {_clocks(clock)}")
    if not machine["clocks"]:
        lines.append("- Clocks: nvidia-smi did not tell them")
    if "peak" in kernels:
        published, measured = kernels["peak"]["published"], kernels["peak"]["measured"]
        told = "not in our table" if published is None else f"{published:g} by the {kernels['peak']['source']}"
        lines.append(f"- int8 peak in tera-operations per second: {told}; {measured:g} by torch._int_mm of 8192 x 8192 x 8192 here")
    return "\n".join(lines)


def _clocks(clock: Mapping[str, Any]) -> str:
    if clock["sm_mhz"] is None:
        return "not told"
    low, middle, high = clock["sm_mhz"]
    rest = {"max_sm_mhz": "of at most {:g} MHz", "mem_mhz": "memory {:g} MHz", "power_w": "up to {:g} W", "temperature_c": "up to {:g} C"}
    told = [text.format(clock[key]) for key, text in rest.items() if clock[key] is not None]
    return ", ".join([f"{low:g} to {high:g} MHz, median {middle:g}", *told])


def _latency(name: str, found: Mapping[str, Any]) -> str:
    lines = []
    for capability, plan in sorted(found["plans"].items()):
        for row in plan["latency"]:
            rival = "" if row["rival"] is None else f"{row['rival']['p50_ms']:.3f} ({plan['rival']['precision']})"
            launched = "" if row["launched"] is None else f"{row['launched']['p50_ms']:.3f}"
            shape = f"{row['batch']} x {row['sequence'] or 'image'}"
            times = f"{row['plan']['p50_ms']:.3f} | {rival} | {_number(row['speedup'])} | {launched}"
            lines.append(f"| {name} | sm{capability} | {shape} | {times} |")
    return "\n".join(lines) or f"| {name} | | no plan was built | | | | |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _limit(line: Verdict) -> str:
    return "" if line.limit is None else f"{'at most' if line.at_most else 'at least'} {line.limit:g}"


def _verdict(line: Verdict) -> str:
    word = f"**{line.word}**" if line.word in ("missed", "not measured") else line.word
    return word if line.reason is None else f"{word}: {line.reason}"
