"""The settings of the served model that were searched by measured load, the best first."""

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
    return {"model": found["model"], "limit": phrases.milliseconds(found["limit_p99_ms"]), "rows": rows}
