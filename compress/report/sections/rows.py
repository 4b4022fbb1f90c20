"""Rows in the report: how many each split has, how well each class is told apart, and rows whose answer changed, as texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compress.report import phrases
from compress.report.phrases import engine_name
from compress.report.view import Report, View
from foundation.core.engines import REFERENCE

FOLDED = 160
"""Characters of a text above which the page folds it."""
MANY_CLASSES = 24
"""Classes above which the page folds the table."""


def splits(report: Report) -> View | None:
    """Returns rows of each split, and what train and evaluation had in common; None in reports that do not say."""
    shared, sizes = report.get("evaluation_rows") or {}, report.get("data") or ()
    rows = [
        {
            "name": str(split.get("split")),
            "rows": _count(split.get("rows")),
            "truncated": _part(split.get("truncated"), split.get("rows")),
            "longest": _count(split.get("longest")),
        }
        for split in sizes
    ]
    known = {key: shared[key] for key in ("left_out_of_train", "in_train") if shared.get(key) is not None}
    return {"rows": rows, "shared": known} if rows or known else None


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _part(part: int | None, whole: int | None) -> str:
    """Returns a number of rows, with their share where there are any."""
    return "" if part is None else f"{part:,} ({phrases.share(part / whole)})" if part and whole else f"{part:,}"


def classes(report: Report) -> View | None:
    """Returns a row for each class: precision, recall and F1 of the baseline in torch and of what is served; None without classes."""
    found = report.get("classes") or {}
    rows = [
        {
            "name": str(one.get("name")),
            "n": _count(one.get("n")),
            "cells": [_cells(one.get("baseline")), _cells(one.get("served"))] if found.get("backend") else [_cells(one.get("baseline"))],
        }
        for one in found.get("rows") or ()
    ]
    majority, chance = found.get("majority"), report["metric"].get("chance")
    always = None if majority is None else {"name": str(majority["name"]), "share": phrases.figure(majority["share"], "accuracy")}
    heads = [f"baseline, {engine_name(REFERENCE)}", *([f"served, {engine_name(found['backend'])}"] if found.get("backend") else [])]
    known = {"chance": None if chance is None else phrases.figure(chance, report["metric"]["name"]), "majority": always}
    return {"rows": rows, "heads": heads, "many": len(rows) > MANY_CLASSES, **known} if rows else None


def _cells(figures: Report | None) -> list[str]:
    return [_share((figures or {}).get(key)) for key in ("precision", "recall", "f1")]


def _share(value: float | None) -> str:
    return "" if value is None else phrases.figure(value, "f1")


def flipped(report: Report) -> list[View]:
    """Returns rows whose answer changed, with their texts; empty in reports without them."""
    return [
        {
            "row": _count(line.get("row")),
            "place": _place(line),
            "step": f"{line.get('variant')}, {_name(line.get('from'))} \u2192 {_name(line.get('to'))}",
            "before": _text(line.get("before")),
            "after": _text(line.get("after")),
            "label": None if line.get("label") is None else _text(line["label"]),
            "verdict": _verdict(line),
            "text": _text(line.get("input")),
        }
        for line in report.get("flipped_rows") or ()
    ]


def _place(line: Report) -> str:
    """Returns the word, label or position of a row that the flip is of; empty where it is of the whole row."""
    of = "" if line.get("of") is None else str(line["of"])
    return of if line.get("position") is None else f"{of} (place {line['position']})".strip()


def _name(backend: Any) -> str:
    words = str(backend).split(" ")
    return " ".join([*words[:-1], engine_name(words[-1])])


def _verdict(line: Report) -> str:
    label = line.get("label")
    right = [label == line.get(key) for key in ("before", "after")]
    if label is None and "right_before" in line:
        right = [bool(line["right_before"]), bool(line.get("right_after"))]
    elif label is None:
        return ""
    return "lost" if right[0] else "gained" if right[1] else "wrong before and after"


def _text(value: Any) -> View:
    """Returns a text, or the texts of a pair, in full and, if it is long, its beginning."""
    parts: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    whole = " / ".join("" if part is None else str(part) for part in parts)
    return {"whole": whole, "start": f"{whole[:FOLDED]} ..." if len(whole) > FOLDED else None}


def memory(report: Report) -> list[View]:
    """Returns the peak memory of each engine, the largest of its shapes, and of each served model; empty where none was measured."""
    peaks: dict[str, int] = {}
    for variant in report["variants"]:
        for row in variant["latency"]:
            name = f"{variant.get('id')}, {engine_name(row.get('engine'))} {row.get('precision') or ''} {row.get('mode') or ''}".rstrip()
            if row.get("peak_memory_bytes"):
                peaks[name] = max(peaks.get(name, 0), row["peak_memory_bytes"])
    found: list[View] = [{"name": name, "where": "engine", "bytes": size} for name, size in peaks.items()]
    found += [
        {"name": str(model.get("model")), "where": "Triton", "bytes": model["peak_memory_bytes"]}
        for model in report["triton"].get("models") or ()
        if model.get("peak_memory_bytes")
    ]
    largest = max((one["bytes"] for one in found), default=0) or 1
    return [{**one, "text": phrases.size(one["bytes"]), "width": round(100 * one["bytes"] / largest, 2)} for one in found]
