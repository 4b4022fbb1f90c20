"""The model that `export.tensor_parallel` divided, in the report: what each rank holds, and whether they give the answers of the whole."""

from __future__ import annotations

from compress.report.view import Report, View


def divided(report: Report) -> list[View]:
    """Returns a sentence for each variant that was divided over devices, with its id."""
    return [{"id": variant.get("id"), "told": _told(variant["divided"])} for variant in report["variants"] if variant.get("divided")]


def _told(found: Report) -> str:
    sizes = found.get("bytes") or [0]
    same = "the same answers to the last bit" if found.get("equal") else f"answers at most {found.get('max_abs') or 0.0:.2g} apart"
    return (
        f"divided over {found.get('ranks')} devices, at most {max(sizes) / 1e6:,.1f} MB of weights on each ({found.get('folder')}); "
        f"compared with the undivided model on {found.get('rows')} rows: {same}"
    )
