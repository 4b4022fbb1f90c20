"""The stage `compact` in the report: what it removed from each block, the zeros that are left, and that the outputs are the same."""

from __future__ import annotations

from collections.abc import Callable

from compress.report import phrases
from compress.report.model.contents import Contents
from compress.report.model.stages import Change, Compaction
from compress.report.view import View


def compaction(report: Contents) -> list[View]:
    """Returns a view for each compacted variant."""
    found = [(variant.id, Compaction.model_validate(variant.compaction)) for variant in report.variants if variant.compaction]
    return [_view(name, figures) for name, figures in found]


def _view(name: str, figures: Compaction) -> View:
    before, after = figures.before, figures.after
    return {
        "id": name,
        "figures": _figures(figures),
        "blocks": [
            {"heads": _kept(heads, were), "neurons": _kept(neurons, had)}
            for heads, were, neurons, had in zip(after.heads, before.heads, after.ffn, before.ffn, strict=True)
        ],
    }


def _figures(figures: Compaction) -> list[tuple[str, str]]:
    unread, constant = figures.unread, figures.constant
    found = [
        ("never read", f"{unread.heads:,} heads, {unread.neurons:,} neurons"),
        ("constant", f"{constant.heads:,} heads, {constant.neurons:,} neurons"),
        ("zero weights", _change(figures.zeros, lambda share: f"{100 * share:.1f} %")),
        ("parameters", _change(figures.parameters, lambda number: f"{number:,.0f}")),
    ]
    if figures.difference is not None:
        found.append(("outputs differ by", f"{figures.difference:.1e} at most"))
    if figures.seconds is not None:
        found.append(("time", f"{figures.seconds:.1f} s"))
    return found


def _change(change: Change, words: Callable[[float], str]) -> str:
    if change.before is None or change.after is None:
        return phrases.NOT_MEASURED
    return f"{words(change.after)} (before: {words(change.before)})"


def _kept(after: int, before: int) -> str:
    return f"{after:,} of {before:,}"
