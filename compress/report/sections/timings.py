"""What timings are worth: how busy the machine was during the latency step, in one sentence, and a mark for each row."""

from __future__ import annotations

from typing import Any

from compress.report.view import Report


def sentence(report: Report) -> str | None:
    """Returns how busy the machine was; None in reports of runs that did not watch it."""
    found: Any = report.get("timings")
    if not found:
        return None
    machine = found["machine"]
    others = "an unknown number" if machine["other_cores"] is None else f"{machine['other_cores']:.1f}"
    parts = [f"Other work took {others} of the {machine['cores']} cores while engines were timed"]
    if machine.get("stolen"):
        parts.append(f"other guests of the host {100 * machine['stolen']:.1f} % of the time")
    if machine.get("throttled_s"):
        parts.append(f"the limit of the container stopped processes for {machine['throttled_s']:.1f} s")
    if machine.get("calibration_spread") is not None:
        parts.append(f"a fixed kernel between engines varied by {100 * machine['calibration_spread']:.0f} %")
    rows = f"{found['estimated']} of {found['rows']} latencies are estimated from processor time, {found['busy']} are too noisy to judge"
    return f"{', '.join(parts)}. {rows}."


def mark(row: Report) -> str | None:
    """Returns what a row of the table is marked with."""
    if row.get("busy"):
        return "machine busy"
    if row.get("estimated"):
        return "estimated"
    turns = row.get("turns_ms")
    return "one turn" if turns and len(turns) == 1 else None


def interval(row: Report) -> str | None:
    """Returns the 95 % interval of the median, for the mouse; None where it is unknown."""
    ends = row.get("interval_ms")
    if not ends:
        return None
    disturbed = (
        "" if row.get("disturbed") is None else f"; threads waited for a core in {100 * row['disturbed']:.0f} % of the samples taken"
    )
    return f"95 % interval {ends[0]:.4g} to {ends[1]:.4g} ms{disturbed}"
