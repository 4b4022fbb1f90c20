"""The stage `sparsify` in the report: the zeros of each layer, and the effect of the group-lasso penalty on its groups.

Each function turns figures of the manifest into strings and positions for the template; a figure that the manifest lacks is skipped.
"""

from __future__ import annotations

from compress.report import phrases
from compress.report.model.contents import Contents
from compress.report.model.stages import Groups, SparseLayer, Sparsity
from compress.report.view import View


def sparsity(report: Contents) -> list[View]:
    """Returns a view for each sparsified variant."""
    found = [(variant.id, Sparsity.model_validate(variant.sparsity)) for variant in report.variants if variant.sparsity]
    return [_view(name, figures) for name, figures in found if figures.layers]


def _view(name: str, figures: Sparsity) -> View:
    return {
        "id": name,
        "settings": _settings(figures),
        "layers": [_layer(row) for row in figures.layers],
        "quantiles": [_share(share) for share in figures.groups.quantiles],
        "groups": _groups(figures.groups),
        "claim": figures.speed,
    }


def _settings(figures: Sparsity) -> list[tuple[str, str]]:
    unread = figures.unread
    settings = [
        ("method", str(figures.method)),
        ("pattern", str(figures.pattern)),
        ("zero weights", _share(figures.sparsity)),
        ("target", _share(figures.asked)),
    ]
    if figures.latency is not None and figures.latency.after is not None:
        measured, asked = figures.latency.after.measured_ms, figures.latency.asked_ms
        limit = "" if asked is None else f", target {phrases.milliseconds(asked)} ms"
        settings.append(("latency after compaction", f"{phrases.milliseconds(measured)} ms{limit}"))
    if figures.groups.metric:
        settings.append(("metric of the groups", figures.groups.metric))
    if unread.heads is not None:
        settings.append(("without effect", f"{unread.heads} heads, {unread.neurons} neurons"))
    return settings


def _layer(row: SparseLayer) -> View:
    return {
        "name": row.name,
        "share": _share(row.sparsity),
        "width": 0 if row.sparsity is None else round(100 * row.sparsity, 2),
        "blocks": f"{row.zero_blocks:,} of {row.blocks:,}" if row.blocks else "",
        "outputs": row.outputs,
        "inputs": row.inputs,
    }


def _groups(groups: Groups) -> list[View]:
    """Returns for each layer the quantiles of its group sizes, before and after training with the penalty."""
    return [
        {"name": name, "before": [f"{value:.2g}" for value in sizes], "after": [f"{value:.2g}" for value in groups.after[name]]}
        for name, sizes in groups.before.items()
    ]


def _share(value: float | None) -> str:
    return phrases.NOT_MEASURED if value is None else f"{100 * value:.1f} %"
