"""Measurements of a machine with GPUs, in the shape that `make gpu-check` has them. The numbers are made up: no GPU has been measured."""

from __future__ import annotations

from typing import Any

from triton_repo.gpu.check.verdicts import SPEED

SHAPES = ((1, 128), (32, 128), (1, 384), (32, 384))
INT8 = {(1, 128): 1.0, (32, 128): 8.0, (1, 384): 2.0, (32, 384): 30.0}


def plan(speedups: dict[tuple[int, int], float], **changes: Any) -> dict[str, Any]:
    """A record of plans.json, as far as verdicts read it."""
    rows = [
        {
            "batch": batch,
            "sequence": sequence,
            "plan": {"p50_ms": INT8[batch, sequence]},
            "rival": {"p50_ms": INT8[batch, sequence] * speedups.get((batch, sequence), 2.0)},
            "speedup": speedups.get((batch, sequence), 2.0),
        }
        for batch, sequence in SHAPES
    ]
    return {
        "parity": {"passed": True},
        "int8_share": 0.99,
        "latency": rows,
        "rival": {"precision": "fp16", "reason": None},
        **changes,
    }


def model(eager: float = 20.0, compiled: float = 3.0, **changes: Any) -> dict[str, Any]:
    """What is measured of one model on two GPUs; torch takes `eager` and `compiled` times as long as int8."""
    rows = []
    for (batch, sequence), ms in INT8.items():
        at = {"batch": batch, "sequence": sequence}
        rows.append({**at, "engine": "tensorrt", "mode": "dynamic", "precision": "int8", "p50_ms": ms})
        rows.append({**at, "engine": "tensorrt", "mode": "dynamic", "precision": "fp16", "p50_ms": ms * 2})
        for mode, times in {"eager": eager, "compiled": compiled}.items():
            rows.append({**at, "engine": "torch", "mode": mode, "precision": "fp16", "p50_ms": ms * times})
            for other, factor in (("fp32", 3.0), ("bf16", 0.5)):  # neither is what int8 is held against
                rows.append({**at, "engine": "torch", "mode": mode, "precision": other, "p50_ms": ms * times * factor})
    return {
        "latency": rows,
        "plans": {"90": plan({})},
        "accuracy": {"served": 0.898, "baseline": 0.9, "max_drop": 0.005, "n": 872, "reason": None},
        "scaling": {"one": 1000.0, "all": 1900.0, "gpus": 2},
        "error": None,
        **changes,
    }


def passing() -> dict[str, Any]:
    """Both models on a machine where everything passes."""
    random = {"served": 0.5, "baseline": 0.5, "max_drop": None, "n": 872, "reason": "random weights: the metric means nothing"}
    return {"sst2-minilm-cuda": model(), SPEED: model(accuracy=random)}
