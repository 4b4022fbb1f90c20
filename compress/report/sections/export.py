"""The stage `export` in the report: which layers run in int8, and how far each engine differs from torch."""

from __future__ import annotations

from compress.report import goals, phrases
from compress.report.phrases import NO_REASON, NOT_MEASURED, engine_name
from compress.report.view import Report, View, or_unmeasured, percent

MANY_LAYERS = 60


def layers(report: Report) -> list[View]:
    """Returns for each quantized variant its layers and the share of its multiply-accumulates that the engine runs in int8."""
    return [_layer_chart(variant) for variant in report["variants"] if variant.get("int8_share") or goals.is_quantized(variant)]


def _layer_chart(variant: Report) -> View:
    layers = variant["int8_layers"]
    total, largest = sum(layer.get("macs") or 0 for layer in layers), max((layer.get("macs") or 0 for layer in layers), default=0)
    rows = [
        {
            "name": layer.get("name") or "unnamed",
            "kind": layer.get("kind") or "GEMM",
            "precision": layer.get("precision") or "unknown",
            "int8": str(layer.get("precision")).startswith(("int8", "i8", "u8")),
            "percent": None if not total or layer.get("macs") is None else percent(layer["macs"] / total),
            "width": round(100 * (layer.get("macs") or 0) / largest, 2) if largest else 0,
        }
        for layer in layers
    ]
    return {
        "id": variant.get("id"),
        "share": phrases.share(variant.get("int8_share")),
        "share_all": phrases.share(variant.get("int8_share_all")),
        "int4": phrases.share(variant["int4_share"]) if variant.get("int4_share") else None,
        "stored": phrases.share(variant["integer_weights"]) if variant.get("integer_weights") is not None else None,
        "known": variant.get("int8_share") is not None,
        "reason": variant.get("int8_share_reason") or NO_REASON,
        "rows": rows,
        "many": len(rows) > MANY_LAYERS,
        "num_int8": sum(bool(row["int8"]) for row in rows),
        "attention": [_fused(row) for row in variant.get("attention") or ()],
    }


def _fused(row: Report) -> View:
    where = f"{engine_name(row['engine'])}, sm{row['capability']}, {row['precision']}"
    rest = "" if row["precision"] == row["float_precision"] else f", rest {row['float_precision']}"
    return {"where": where + rest, "count": f"{row['fused']} of {row['of']}", "reason": row["reason"]}


def parity(report: Report) -> list[View]:
    """Returns for each engine that was compared with torch how far, and from which layer on, the two differ."""
    views = []
    for variant in report["variants"]:
        found = variant.get("parity")
        for entry in found if isinstance(found, list) else [found] if found else []:
            layers = entry.get("layers") or []
            diverging = next((layer for layer in layers if _diverges(layer)), None)
            views.append(
                {
                    "id": variant.get("id"),
                    "engine": engine_name(entry.get("engine")) if entry.get("engine") else None,
                    "state": {True: "met", False: "missed"}.get(entry.get("passed"), "open"),
                    "disagreements": or_unmeasured(entry.get("disagreements")),
                    "limit": entry.get("limit"),
                    "n": entry.get("n"),
                    "median": or_unmeasured(entry.get("median_abs"), ".4f"),
                    "maximum": or_unmeasured(entry.get("max_abs"), ".3f"),
                    "layers": f"{len(layers)} layers" if layers else NOT_MEASURED,
                    "codes": f"{sum(layer.get('codes') or 0 for layer in layers):,}",
                    "different": f"{sum(layer.get('different') or 0 for layer in layers):,}",
                    "diverging": diverging.get("layer") if diverging else None,
                }
            )
    return views


def _diverges(layer: Report) -> bool:
    """Whether a layer has more differing codes than rounding explains, or wrong integer sums."""
    return (layer.get("different") or 0) > (layer.get("allowed") or 0) or (layer.get("wrong_sums") or 0) > 0
