"""The model that `export.tensor_parallel` divided, in the report: what each rank holds, and whether they give the answers of the whole."""

from __future__ import annotations

from compress.report.model.contents import Contents
from compress.report.view import View
from foundation.artifacts.exported import Divided


def divided(report: Contents) -> list[View]:
    """Returns a sentence for each variant that was divided over devices, with its id."""
    return [{"id": variant.id, "text": _sentence(variant.divided)} for variant in report.variants if variant.divided]


def _sentence(divided: Divided) -> str:
    same = "the same answers to the last bit" if divided.equal else f"answers at most {divided.max_abs or 0.0:.2g} apart"
    return (
        f"divided over {divided.ranks} devices, at most {max(divided.bytes, default=0) / 1e6:,.1f} MB of weights on each "
        f"({divided.folder}); compared with the undivided model on {divided.rows} rows: {same}{_balance(divided)}"
    )


def _balance(divided: Divided) -> str:
    """Describes what the placement of experts by their measured load gains, if there is one."""
    if divided.busiest is None or divided.busiest_in_order is None:
        return ""
    return (
        f"; experts are placed by their measured load: the busiest device reads {divided.busiest:.2f} times the tokens of the mean "
        f"({divided.busiest_in_order:.2f} times with experts in order)"
    )
