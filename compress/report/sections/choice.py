"""The section on the served model: the configurations that competed, and the figures that decided."""

from __future__ import annotations

from compress.report import phrases
from compress.report.decision import Decision
from compress.report.view import View


def choice(decision: Decision) -> View | None:
    """Returns the served configuration, the reason, and the rows of all competitors, the served one first; None if no engine was built."""
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
