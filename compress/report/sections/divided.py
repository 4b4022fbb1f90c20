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
        f"({divided.folder}); compared with the undivided model on {divided.rows} rows: {same}"
    )
