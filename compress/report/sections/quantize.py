"""The stage `quantize` in the report: its settings, the sensitivity of each layer, and the attempts."""

from __future__ import annotations

from collections.abc import Sequence

from compress.report import phrases
from compress.report.model.contents import Contents
from compress.report.model.stages import Attempt, LayerGain, LayerNoise, Quantization
from compress.report.sections.prune import bars
from compress.report.view import View, is_scalar, plain


def quantization(report: Contents) -> list[View]:
    """Returns for each quantized variant its settings and, if measured, its layers, the most sensitive first."""
    views = []
    for variant in report.variants:
        if variant.quantization is not None:
            found = Quantization.model_validate(variant.quantization)
            views.append(
                {
                    "id": variant.id,
                    "settings": [
                        (key, plain(value)) for key, value in variant.quantization.items() if key != "layers" and is_scalar(value)
                    ],
                    "layers": _sensitivities(found.layers),
                    "scan": _scan(found.sensitivity.layers),
                    "unit": phrases.DISTANCES.get(str(found.sensitivity.measure), "distance"),
                    "attempts": _attempts(found.attempts),
                    "loads": _loads(found),
                }
            )
    return views


def _scan(layers: Sequence[LayerGain]) -> list[View]:
    """Returns the error that each layer causes in int8, in scan order: the gain of keeping it in float, and its error alone and by part."""
    top = max((abs(layer.gain) for layer in layers), default=0) or 1
    return [
        {
            "name": layer.name,
            "width": round(100 * max(0.0, layer.gain) / top, 2),
            "gain": f"{layer.gain:.2e}",
            "alone": f"{layer.alone:.2e}",
            "weights": f"{layer.weights:.2e}",
            "inputs": f"{layer.inputs:.2e}",
        }
        for layer in layers
    ]


def _attempts(attempts: Sequence[Attempt]) -> list[View]:
    """Returns the attempts that preceded the choice: name, error, seconds, and whether it was chosen."""
    return [
        {
            "name": attempt.name,
            "value": plain(attempt.value),
            "seconds": "not measured" if attempt.seconds is None else f"{attempt.seconds:.1f} s",
            "kept": attempt.kept,
        }
        for attempt in attempts
    ]


def _sensitivities(layers: Sequence[LayerNoise]) -> list[View]:
    """Returns the signal-to-quantization-noise ratio of each layer, lowest input ratio first; layers without one are skipped."""
    measured = [(float(layer.input_sqnr_db), layer) for layer in layers if layer.input_sqnr_db is not None]
    known = sorted(measured, key=lambda one: one[0])
    top = max((ratio_db for ratio_db, _ in known), default=0.0) or 1.0
    return [
        {
            "name": layer.name,
            "input": f"{ratio_db:.1f}",
            "weight": None if layer.weight_sqnr_db is None else f"{layer.weight_sqnr_db:.1f}",
            "width": max(0, round(100 * ratio_db / top, 2)),
        }
        for ratio_db, layer in known
    ]


def _loads(found: Quantization) -> list[View]:
    """Returns for each layer of experts the share of its tokens that each expert reads, and the tokens that no expert has room for."""
    views = []
    for name, tokens in found.experts.items():
        shares, dropped = [count / max(1, sum(tokens)) for count in tokens], found.dropped_tokens.get(name, 0)
        busiest = f"{max(shares, default=0) * len(shares):.2f}"
        views.append({"name": name, "bars": bars(shares), "busiest": busiest, "dropped": f"{dropped:,}" if dropped else None})
    return views
