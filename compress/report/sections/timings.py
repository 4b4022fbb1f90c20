"""Reliability of timings: how busy the machine was during the latency step, in one sentence, and a mark for each row."""

from __future__ import annotations

from compress.report.model.contents import Contents
from compress.report.model.variant import Latency


def sentence(report: Contents) -> str | None:
    """Returns how busy the machine was; None in reports of runs that did not watch it."""
    found = report.timings
    if found is None:
        return None
    machine = found.machine
    others = "an unknown number" if machine.other_cores is None else f"{machine.other_cores:.1f}"
    parts = [f"While engines were timed, other work used {others} of the {machine.cores} cores"]
    if machine.came_first:
        parts[0] += " and waited for the engines"
    if machine.stolen:
        parts.append(f"other guests of the host used {100 * machine.stolen:.1f} % of the time")
    if machine.throttled_s:
        parts.append(f"the limit of the container stopped processes for {machine.throttled_s:.1f} s")
    sentences = ["; ".join(parts)]
    if machine.calibration_spread is not None:
        sentences.append(f"The time of a fixed kernel, run between engines, varied by {100 * machine.calibration_spread:.0f} %")
    if found.estimated or found.busy:
        rows = f"{found.estimated} of {found.rows} latencies are estimated from processor time, {found.busy} are too noisy to judge"
    else:
        rows = f"All {found.rows} latencies were measured"
    return f"{'. '.join([*sentences, rows])}."


def mark(row: Latency) -> str | None:
    """Returns the marks of a row of the table."""
    if row.busy:
        return "machine busy"
    if row.estimated:
        return "estimated"
    return "one turn" if len(row.turns_ms) == 1 else None


def interval(row: Latency) -> str | None:
    """Returns the 95 % interval of the median, for the mouse; None where it is unknown."""
    if not row.interval_ms:
        return None
    disturbed = "" if row.disturbed is None else f"; threads waited for a core in {100 * row.disturbed:.0f} % of the samples taken"
    return f"95 % interval {row.interval_ms[0]:.4g} to {row.interval_ms[1]:.4g} ms{disturbed}"
