"""The stage `quantize` in the report: its settings, the sensitivity of each layer, and the attempts."""

from __future__ import annotations

from typing import Any

from compress.report import phrases
from compress.report.model.contents import Contents
from compress.report.view import View, is_scalar, plain


def quantization(report: Contents) -> list[View]:
    """Returns for each quantized variant its settings and, if measured, its layers, the most sensitive first."""
    views = []
    for variant in report.variants:
        found = variant.quantization
        if found is not None:
            layers = _sensitivities(found.get("layers"))
            settings = [(key, plain(value)) for key, value in found.items() if key != "layers" and is_scalar(value)]
            scan, tried = found.get("sensitivity") or {}, found.get("attempts")
            views.append(
                {
                    "id": variant.id,
                    "settings": settings,
                    "layers": layers,
                    "scan": _scan(scan.get("layers") or []),
                    "unit": phrases.DISTANCES.get(str(scan.get("measure")), "distance"),
                    "attempts": _attempts(tried if isinstance(tried, list) else []),
                }
            )
    return views


def _scan(layers: list[Any]) -> list[View]:
    """Returns the error that each layer causes in int8, in scan order: the gain of keeping it in float, and its error alone and by part."""
    top = max((abs(layer["gain"]) for layer in layers), default=0) or 1
    return [
        {
            "name": layer["name"],
            "width": round(100 * max(0.0, layer["gain"]) / top, 2),
            **{key: f"{layer[key]:.2e}" for key in ("gain", "alone", "weights", "inputs")},
        }
        for layer in layers
    ]


def _attempts(attempts: list[Any]) -> list[View]:
    """Returns the attempts that preceded the choice: name, error, seconds, and whether it was chosen."""
    return [
        {
            "name": attempt.get("name") or "unnamed",
            "value": plain(attempt.get("value")),
            "seconds": f"{attempt['seconds']:.1f} s" if attempt.get("seconds") is not None else "not measured",
            "kept": bool(attempt.get("kept")),
        }
        for attempt in attempts
    ]


def _sensitivities(layers: Any) -> list[View]:
    """Returns the signal-to-quantization-noise ratio of each layer, lowest input ratio first; layers without one are skipped."""
    items = layers if isinstance(layers, list) else []
    measured = [item for item in items if item and item.get("input_sqnr_db") is not None]
    known = sorted(measured, key=lambda item: float(item["input_sqnr_db"]))
    top = max((item["input_sqnr_db"] for item in known), default=0) or 1
    return [
        {
            "name": item.get("name") or "unnamed",
            "input": f"{item['input_sqnr_db']:.1f}",
            "weight": f"{item['weight_sqnr_db']:.1f}" if item.get("weight_sqnr_db") is not None else None,
            "width": max(0, round(100 * item["input_sqnr_db"] / top, 2)),
        }
        for item in known
    ]
