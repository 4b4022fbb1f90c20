"""The stage `sparsify` in the report: the zeros of each layer, and the effect of the group-lasso penalty on its groups.

Each function turns figures of the manifest into strings and positions for the template; a figure that the manifest lacks is skipped.
"""

from __future__ import annotations

from typing import Any

from compress.report import phrases
from compress.report.model.contents import Contents
from compress.report.view import View
from foundation.artifacts.document import Figures


def sparsity(report: Contents) -> list[View]:
    """Returns a view for each sparsified variant."""
    return [_view(variant.id, variant.sparsity) for variant in report.variants if variant.sparsity and variant.sparsity.get("layers")]


def _view(name: str, figures: Figures) -> View:
    return {
        "id": name,
        "settings": _settings(figures),
        "layers": [_layer(row) for row in figures["layers"]],
        "quantiles": [_share(share) for share in (figures.get("groups") or {}).get("quantiles") or ()],
        "groups": _groups(figures.get("groups") or {}),
        "claim": str(figures.get("speed") or ""),
    }


def _settings(figures: Figures) -> list[tuple[str, str]]:
    unused = figures.get("unread") or {}
    settings = [
        ("method", str(figures.get("method"))),
        ("pattern", str(figures.get("pattern"))),
        ("zero weights", _share(figures.get("sparsity"))),
        ("target", _share(figures.get("asked"))),
    ]
    if (figures.get("groups") or {}).get("metric"):
        settings.append(("metric of the groups", str(figures["groups"]["metric"])))
    if unused.get("heads") is not None:
        settings.append(("without effect", f"{unused['heads']} heads, {unused['neurons']} neurons"))
    return settings


def _layer(row: Figures) -> View:
    blocks = f"{row['zero_blocks']:,} of {row['blocks']:,}" if row.get("blocks") else ""
    return {
        "name": row["name"],
        "share": _share(row.get("sparsity")),
        "width": round(100 * (row.get("sparsity") or 0), 2),
        "blocks": blocks,
        "outputs": row.get("outputs"),
        "inputs": row.get("inputs"),
    }


def _groups(groups: Figures) -> list[View]:
    """Returns for each layer the quantiles of its group sizes, before and after training with the penalty."""
    before, after = groups.get("before") or {}, groups.get("after") or {}
    return [
        {"name": name, "before": [f"{value:.2g}" for value in before[name]], "after": [f"{value:.2g}" for value in after[name]]}
        for name in before
    ]


def _share(value: Any) -> str:
    return phrases.NOT_MEASURED if value is None else f"{100 * float(value):.1f} %"
