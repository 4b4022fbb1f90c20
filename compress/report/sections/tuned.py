"""The settings of the served model that were searched by measured load, those that are served first, and what confirmed them."""

from __future__ import annotations

from compress.report import phrases
from compress.report.view import Report, View


def tuned(report: Report) -> View | None:
    """Returns the limit and a row for each setting that was tried; None where no search was asked for."""
    found = report["triton"].get("tuned")
    if not found:
        return None
    trials = found.get("trials") or []
    own = next((trial["rows_per_s"] for trial in trials if trial.get("own")), None)
    rows = [
        {
            **{key: trial.get(key) for key in ("instances", "threads", "max_batch_size", "own", "rounds", "concurrency")},
            "delay": phrases.milliseconds(trial["max_queue_delay_us"] / 1e3),
            "rate": phrases.rate(trial["rows_per_s"]),
            "gain": phrases.ratio(trial["rows_per_s"] / own) if own else "",
            "p99": None if trial["p99_ms"] is None else phrases.milliseconds(trial["p99_ms"]),
        }
        for trial in trials
    ]
    limit = phrases.milliseconds(found["limit_p99_ms"])
    return {"model": found["model"], "limit": limit, "rows": rows, "confirmation": _confirmation(found)}


def _confirmation(found: Report) -> View | None:
    """Returns the ratio over the repeats; None in reports of versions that confirmed nothing, and where the settings of the recipe won."""
    confirmed = found.get("confirmation")
    if not confirmed:
        return None
    ends = {key: None if end is None else phrases.ratio(end) for key, end in (confirmed.get("ratio") or {}).items()}
    proposed, trials = confirmed["proposed"], found.get("trials") or []
    row = next((number for number, trial in enumerate(trials, 1) if all(trial.get(key) == proposed[key] for key in proposed)), None)
    return {**ends, "repeats": confirmed["repeats"], "taken": confirmed["taken"], "row": row}
