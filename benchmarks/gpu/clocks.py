"""The clocks of the GPUs while they are measured: `nvidia-smi` asked once a second, in a file of its own.

    with watching(file): ...
    summary(file.read_text())     of each GPU: clocks (MHz), power (W), temperature (C) of the seconds in which it worked

A figure without the clock that it was measured at cannot be held against another: data sheets are at the boost clock, which power and heat
lower.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foundation.machine.process import spawn

FIELDS = ("index", "utilization.gpu", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "temperature.gpu")
COMMAND = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "--loop=1")
STOP_SECONDS = 10.0


@contextmanager
def watching(file: Path, command: Sequence[str] = COMMAND) -> Iterator[None]:
    """Writes what the GPUs do to a file, a line for each GPU and second, until the end of the context.

    Args:
        file: Written anew.
        command: Prints the lines.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as lines:
        process = spawn(command, stdin=subprocess.DEVNULL, stdout=lines, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


def summary(text: str) -> list[dict[str, Any]]:
    """Returns what the GPUs did, by their number.

    Args:
        text: Lines of `COMMAND`; what is cut off or not told ("[N/A]") is left out.

    Returns:
        Of each `gpu`: `seconds` in which it worked, and of those `sm_mhz` (lowest, median, highest), `max_sm_mhz`, the clock that it is
        made for, `mem_mhz` (median), `power_w` and `temperature_c` (highest); None where that is not told.
    """
    rows: dict[int, list[dict[str, float]]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS) or not cells[0].isdigit():
            continue
        told = {name: value for name, cell in zip(FIELDS[1:], cells[1:], strict=True) if (value := _number(cell)) is not None}
        working = rows.setdefault(int(cells[0]), [])
        if told.get("utilization.gpu", 0) > 0:
            working.append(told)
    return [{"gpu": gpu, "seconds": len(working), **_figures(working)} for gpu, working in sorted(rows.items())]


def _figures(working: Sequence[dict[str, float]]) -> dict[str, Any]:
    def of(name: str) -> list[float]:
        return [told[name] for told in working if name in told]

    sm = of("clocks.sm")
    return {
        "sm_mhz": [min(sm), statistics.median(sm), max(sm)] if sm else None,
        "max_sm_mhz": max(of("clocks.max.sm"), default=None),
        "mem_mhz": statistics.median(of("clocks.mem")) if of("clocks.mem") else None,
        "power_w": max(of("power.draw"), default=None),
        "temperature_c": max(of("temperature.gpu"), default=None),
    }


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
