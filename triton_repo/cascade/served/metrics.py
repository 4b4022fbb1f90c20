"""The metrics of a cascade, which Triton exports with its own in the text format of Prometheus.

compress_cascade_rows_total{model, version, instance, tier}           rows by the tier that answered
compress_cascade_escalation_rate{..., tier}                           share of the rows since the start that went beyond a tier
compress_cascade_log_e_value{..., test}                               natural logarithm of the e-value of a test
compress_cascade_alarm{..., test}                                     1 once a test has refuted its bound, until the server starts again
compress_cascade_audited_rows_total{...}                              rows of the audit
compress_cascade_audit_disagreements_total{...}                       of these the rows whose answer the last tier gave otherwise
compress_cascade_audit_skipped_rows_total{...}                        rows that were drawn for the audit and left out, because it was behind

Each value goes to the server by a message that waits for its answer, so values are collected and sent now and then (`triton_repo.cascade.
served.watch`), not with every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "compress_cascade_"
COUNTER, GAUGE = "counter", "gauge"
FAMILIES = {
    "rows_total": (COUNTER, "Rows by the tier that answered."),
    "escalation_rate": (GAUGE, "Share of the rows since the start that went beyond a tier."),
    "log_e_value": (GAUGE, "Natural logarithm of the e-value of a test of a bound."),
    "alarm": (GAUGE, "1 once a test has refuted its bound."),
    "audited_rows_total": (COUNTER, "Rows of the audit."),
    "audit_disagreements_total": (COUNTER, "Rows of the audit whose answer the last tier gave otherwise."),
    "audit_skipped_rows_total": (COUNTER, "Rows that were drawn for the audit and left out."),
}


class Metrics:
    """The metrics of one process of a cascade.

    Args:
        backend: The class `MetricFamily` of the server.
        labels: Labels of all of them.
    """

    def __init__(self, backend: Any, labels: Mapping[str, str]) -> None:
        kinds = {COUNTER: backend.COUNTER, GAUGE: backend.GAUGE}
        self._families = {
            name: backend(name=f"{PREFIX}{name}", description=about, kind=kinds[kind]) for name, (kind, about) in FAMILIES.items()
        }
        self._labels = dict(labels)
        self._metrics: dict[tuple[str, str], Any] = {}
        self._sent: dict[tuple[str, str], float] = {}

    def send(self, name: str, value: float, **label: str) -> None:
        """Sends the present value of a metric; of a counter what was counted since the start.

        Args:
            name: One of `FAMILIES`.
            value: The value.
            label: A further label.
        """
        key = name, ",".join(f"{one}={text}" for one, text in label.items())
        if key not in self._metrics:
            self._metrics[key] = self._families[name].Metric(labels={**self._labels, **label})
            self._sent[key] = 0.0
        if FAMILIES[name][0] == GAUGE:
            self._metrics[key].set(value)
        elif value > self._sent[key]:
            self._metrics[key].increment(value - self._sent[key])
        self._sent[key] = value

    def close(self) -> None:
        """Deletes the metrics, and then their families, as the server wants it."""
        self._metrics.clear()
        self._families.clear()
