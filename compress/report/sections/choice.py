"""What is served in the report: the configurations that competed, with what each was judged by."""

from __future__ import annotations

from compress.report import phrases
from compress.report.view import Report, View


def choice(report: Report) -> View | None:
    """Returns what is served, why, and the rows of those that competed, the served one first; None where no engine was built."""
    served = report.get("served")
    if not served:
        return None
    metric = report["metric"]["name"]
    rows = [
        {
            "name": phrases.configuration(row),
            "time": phrases.milliseconds(row["time_ms"]),
            "metric": phrases.figure(row["metric"], metric),
            "size": phrases.size(row["size_bytes"]),
            "missed": ", ".join(row["missed"]),
        }
        for row in served.get("ranking") or ()
    ]
    return {"name": phrases.configuration(served), "reason": served["reason"], "rows": rows}
