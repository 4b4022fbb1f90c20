"""The stage `export` in the report: which layers run in int8, and how far each engine differs from torch."""

from __future__ import annotations

from compress.report import goals, phrases
from compress.report.model.contents import Contents
from compress.report.model.variant import Attention, Variant
from compress.report.phrases import NO_REASON, NOT_MEASURED, engine_name
from compress.report.view import View, or_unmeasured, percent
from foundation.artifacts.exported import LayerParity, Parity

MANY_LAYERS = 60


def layers(report: Contents) -> list[View]:
    """Returns for each quantized variant its layers and the share of its multiply-accumulates that the engine runs in int8."""
    return [_layer_chart(variant) for variant in report.variants if variant.int8_share or goals.is_quantized(variant)]


def _layer_chart(variant: Variant) -> View:
    layers = variant.int8_layers
    total, largest = sum(layer.macs or 0 for layer in layers), max((layer.macs or 0 for layer in layers), default=0)
    rows = [
        {
            "name": layer.name or "unnamed",
            "kind": layer.kind or "GEMM",
            "precision": layer.precision or "unknown",
            "int8": str(layer.precision).startswith(("int8", "i8", "u8")),
            "percent": None if not total or layer.macs is None else percent(layer.macs / total),
            "width": round(100 * (layer.macs or 0) / largest, 2) if largest else 0,
        }
        for layer in layers
    ]
    return {
        "id": variant.id,
        "share": phrases.share(variant.int8_share),
        "share_all": phrases.share(variant.int8_share_all),
        "int4": phrases.share(variant.int4_share) if variant.int4_share else None,
        "stored": phrases.share(variant.integer_weights) if variant.integer_weights is not None else None,
        "reported": ", ".join(f"{name} {value}" for name, value in variant.reported.items()),
        "known": variant.int8_share is not None,
        "reason": variant.int8_share_reason or NO_REASON,
        "rows": rows,
        "many": len(rows) > MANY_LAYERS,
        "num_int8": sum(bool(row["int8"]) for row in rows),
        "attention": [_fused(row) for row in variant.attention],
    }


def _fused(row: Attention) -> View:
    where = f"{engine_name(row.engine)}, sm{row.capability}, {row.precision}"
    rest = "" if row.precision == row.float_precision else f", rest {row.float_precision}"
    return {"where": where + rest, "count": f"{row.fused} of {row.of}", "reason": row.reason}


def parity(report: Contents) -> list[View]:
    """Returns for each engine that was compared with torch how far, and from which layer on, the two differ."""
    return [_parity(variant.id, variant.parity) for variant in report.variants if variant.parity is not None]


def _parity(variant: str, parity: Parity) -> View:
    layers = parity.layers
    return {
        "id": variant,
        "engine": engine_name(parity.engine) if parity.engine else None,
        "state": "open" if parity.passed is None else "met" if parity.passed else "missed",
        "disagreements": or_unmeasured(parity.disagreements),
        "limit": parity.limit,
        "n": parity.n,
        "median": or_unmeasured(parity.median_abs, ".4f"),
        "maximum": or_unmeasured(parity.max_abs, ".3f"),
        "layers": f"{len(layers)} layers" if layers else NOT_MEASURED,
        "codes": f"{sum(layer.codes or 0 for layer in layers):,}",
        "different": f"{sum(layer.different or 0 for layer in layers):,}",
        "diverging": next((layer.layer for layer in layers if _diverges(layer)), None),
    }


def _diverges(layer: LayerParity) -> bool:
    """Whether a layer has more differing codes than rounding explains, or wrong integer sums."""
    return (layer.different or 0) > (layer.allowed or 0) or (layer.wrong_sums or 0) > 0
