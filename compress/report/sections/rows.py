"""Rows in the report: how many each split has, how well each class is recognized, and rows whose answer changed, as texts."""

from __future__ import annotations

from collections.abc import Sequence

from compress.report import phrases
from compress.report.model.contents import ClassFigures, Contents, Flip
from compress.report.phrases import engine_name
from compress.report.view import View
from foundation.core.engines import REFERENCE

FOLDED = 160
"""Characters of a text above which the page folds it."""
MANY_CLASSES = 24
"""Classes above which the page folds the table."""


def splits(report: Contents) -> View | None:
    """Returns rows of each split, and what train and evaluation had in common; None in reports that do not say."""
    shared = report.evaluation_rows
    rows = [
        {
            "name": str(split.split),
            "rows": _count(split.rows),
            "truncated": _part(split.truncated, split.rows),
            "longest": _count(split.longest),
        }
        for split in report.data
    ]
    found = {"left_out_of_train": shared.left_out_of_train, "in_train": shared.in_train}
    known = {key: value for key, value in found.items() if value is not None}
    return {"rows": rows, "shared": known} if rows or known else None


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _part(part: int | None, whole: int | None) -> str:
    """Returns a number of rows, with their share where there are any."""
    return "" if part is None else f"{part:,} ({phrases.share(part / whole)})" if part and whole else f"{part:,}"


def classes(report: Contents) -> View | None:
    """Returns a row for each class: precision, recall and F1 of the baseline in torch and of what is served; None without classes."""
    found = report.classes
    if found is None or not found.rows:
        return None
    rows = [
        {
            "name": str(one.name),
            "n": _count(one.n),
            "cells": [_cells(one.baseline), _cells(one.served)] if found.backend else [_cells(one.baseline)],
        }
        for one in found.rows
    ]
    majority, chance = found.majority, report.metric.chance
    always = None if majority is None else {"name": majority.name, "share": phrases.figure(majority.share, "accuracy")}
    heads = [f"baseline, {engine_name(REFERENCE)}", *([f"served, {engine_name(found.backend)}"] if found.backend else [])]
    floor = None if chance is None else phrases.figure(chance, report.metric.name)
    known = {"chance": floor, "shuffled": phrases.is_recall(report.metric.name), "majority": always}
    return {"rows": rows, "heads": heads, "many": len(rows) > MANY_CLASSES, **known}


def _cells(figures: ClassFigures | None) -> list[str]:
    figures = figures or ClassFigures()
    return [_share(figure) for figure in (figures.precision, figures.recall, figures.f1)]


def _share(value: float | None) -> str:
    return "" if value is None else phrases.figure(value, "f1")


def flipped(report: Contents) -> list[View]:
    """Returns rows whose answer changed, with their texts; empty in reports without them."""
    return [
        {
            "row": _count(line.row),
            "place": _place(line),
            "step": _step(line),
            "before": _text(line.before),
            "after": _text(line.after),
            "label": None if line.label is None else _text(line.label),
            "verdict": _verdict(line),
            "text": _text(line.input),
        }
        for line in report.flipped_rows
    ]


def _place(line: Flip) -> str:
    """Returns the word, label or position of a row that the flip is of; empty where it is of the whole row."""
    of = "" if line.of is None else str(line.of)
    return of if line.position is None else f"{of} (place {line.position})".strip()


def _step(line: Flip) -> str:
    """Returns where the answer changed, such as "baseline torch -> quantize torch" or "quantize: torch -> OpenVINO"."""
    before, after = _name(line.from_), _name(line.to)
    return f"{before} \u2192 {line.variant} {after}" if " " in str(line.from_) else f"{line.variant}: {before} \u2192 {after}"


def _name(backend: object) -> str:
    words = str(backend).split(" ")
    return " ".join([*words[:-1], engine_name(words[-1])])


def _verdict(line: Flip) -> str:
    right = [line.label == answer for answer in (line.before, line.after)]
    if line.label is None:
        if line.right_before is None:
            return ""
        right = [line.right_before, bool(line.right_after)]
    return "lost" if right[0] else "gained" if right[1] else "wrong before and after"


def _text(value: object) -> View:
    """Returns a text, or the texts of a pair, in full and, if it is long, its beginning."""
    parts: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    whole = " / ".join("" if part is None else str(part) for part in parts)
    return {"whole": whole, "start": f"{whole[:FOLDED]} ..." if len(whole) > FOLDED else None}


def memory(report: Contents) -> list[View]:
    """Returns the peak memory of each engine, the largest of its shapes, and of each served model; empty where none was measured."""
    peaks: dict[str, int] = {}
    for variant in report.variants:
        for row in variant.latency:
            name = f"{variant.id}, {engine_name(row.engine)} {row.precision or ''} {row.mode or ''}".rstrip()
            if row.peak_memory_bytes:
                peaks[name] = max(peaks.get(name, 0), row.peak_memory_bytes)
    found: list[View] = [{"name": name, "where": "engine", "bytes": size} for name, size in peaks.items()]
    found += [
        {"name": str(model.model), "where": "server", "bytes": model.peak_memory_bytes}
        for model in report.triton.models
        if model.peak_memory_bytes
    ]
    largest = max((one["bytes"] for one in found), default=0) or 1
    return [{**one, "text": phrases.size(one["bytes"]), "width": round(100 * one["bytes"] / largest, 2)} for one in found]
