"""The metrics of the front, in the text format of Prometheus; they follow Triton's.

compress_front_requests_total{model, outcome}    answered, refused, timed_out, failed, cancelled
compress_front_under_way{model}                  requests that are waiting or being answered
compress_front_service_seconds{model}            estimated seconds for a row, by which requests are refused
compress_front_version{model}                    version that requests go to
"""

from __future__ import annotations

from collections.abc import Iterator

from triton_repo.front.admission import Admission
from triton_repo.front.routes import Routes

METRICS = {
    "requests_total": ("counter", "Requests that have ended, by outcome."),
    "under_way": ("gauge", "Requests that are waiting or being answered."),
    "service_seconds": ("gauge", "Estimated seconds for a row."),
    "version": ("gauge", "Version that requests go to."),
}


def figures(admission: Admission, routes: Routes) -> str:
    """Returns the metrics."""
    return "".join(f"{line}\n" for line in _lines(admission, routes))


def _lines(admission: Admission, routes: Routes) -> Iterator[str]:
    values: dict[str, list[str]] = {name: [] for name in METRICS}
    for model, flow in sorted(admission.flows.items()):  # a name is checked before it gets here: it needs no escapes
        label = f'model="{model}"'
        values["requests_total"] += [f'{{{label},outcome="{outcome}"}} {count}' for outcome, count in sorted(flow.ended.items())]
        values["under_way"].append(f"{{{label}}} {flow.requests}")
        values["service_seconds"].append(f"{{{label}}} {flow.service_s:.9f}")
        values["version"].append(f"{{{label}}} {routes.of(model).version}")
    for name, (kind, about) in METRICS.items():
        yield f"# HELP compress_front_{name} {about}"
        yield f"# TYPE compress_front_{name} {kind}"
        yield from (f"compress_front_{name}{value}" for value in values[name])
