"""What is served in the report: the configurations that competed, with what each was judged by."""

from __future__ import annotations

from compress.report import phrases
from compress.report.decision import Decision
from compress.report.view import View


def choice(decision: Decision) -> View | None:
    """Returns what is served, why, and the rows of those that competed, the served one first; None where no engine was built."""
    if decision.served is None:
        return None
    rows = [
        {
            "name": phrases.configuration(row),
            "time": phrases.milliseconds(row.time_ms),
            "metric": phrases.figure(row.metric, decision.metric),
            "size": phrases.size(row.size_bytes),
            "missed": ", ".join(row.missed),
        }
        for row in decision.ranking
    ]
    return {"name": phrases.configuration(decision.served), "reason": decision.reason, "rows": rows}
