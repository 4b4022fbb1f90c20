"""The model that `export.tensor_parallel` divided, in the report: what each rank holds, and whether they give the answers of the whole."""

from __future__ import annotations

from compress.report.model.contents import Contents
from compress.report.view import View
from foundation.artifacts.exported import Divided


def divided(report: Contents) -> list[View]:
    """Returns a sentence for each variant that was divided over devices, with its id."""
    return [{"id": variant.id, "told": _told(variant.divided)} for variant in report.variants if variant.divided]


def _told(found: Divided) -> str:
    same = "the same answers to the last bit" if found.equal else f"answers at most {found.max_abs or 0.0:.2g} apart"
    return (
        f"divided over {found.ranks} devices, at most {max(found.bytes, default=0) / 1e6:,.1f} MB of weights on each ({found.folder}); "
        f"compared with the undivided model on {found.rows} rows: {same}"
    )
