"""Measurements of a machine with GPUs, in the shape that `make gpu-check` has them. The numbers are made up: no GPU has been measured."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.verdicts import SPEED

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
            "launched": {"p50_ms": INT8[batch, sequence] + 0.25} if batch == 1 else None,
            "speedup": speedups.get((batch, sequence), 2.0),
        }
        for batch, sequence in SHAPES
    ]
    return {
        "tensorrt": "10.13.3",
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


def sparse_row(speedup: float, outputs: int = 4096, inputs: int = 4096, side: int = 64) -> dict[str, Any]:
    """A block-sparse layer beside the dense one."""
    times = {"dense_ms": 0.1, "sparse_ms": 0.1 / speedup, "speedup": speedup, "allowed": 4.3, "reason": None}
    return {"outputs": outputs, "inputs": inputs, "side": side, **times}


def kernels(**changes: Any) -> dict[str, Any]:
    """What is measured of our own kernels."""
    share = {"kernel": "int8 GEMM, 4096 x 1024 x 4096", "unit": "int8", "ms": 0.03, "tera_per_s": 1145.0, "share": 0.58}
    return {
        "device": "NVIDIA H100 80GB HBM3",
        "versions": {"triton": "3.9.0", "cuda": "13.0"},
        "checked": [{"kernel": "int8 GEMM", "passed": True, "reason": None}],
        "peak": {"published": 1979.0, "measured": 1500.0, "source": "data sheet of H100 SXM"},
        "kernels": [{**share, "floor_share": 0.58, "tile": "128 x 128 x 128", "reason": None}],
        "sparse": [sparse_row(3.0, side=32), sparse_row(3.5), sparse_row(2.0, 1024)],
        "packed": {"sequences_per_s": 4582.0, "difference": 1e-4, "reason": None},
        "shapes": {"rows": [{"batch": 1, "sequence": 128, "ours_ms": 0.5, "eager_ms": 6.0, "speedup": 12.0}], "reason": None},
        "error": None,
        **changes,
    }


MACHINE = {
    "gpus": ["NVIDIA L4", "NVIDIA L4"],
    "driver": "580.1",
    "release": "25.09",
    "command": "make gpu-check RELEASE=25.09",
    "versions": {"python": "3.12.3"},
    "clocks": [
        {
            "gpu": 0,
            "seconds": 90,
            "sm_mhz": [1200.0, 1700.0, 1980.0],
            "max_sm_mhz": 1980.0,
            "mem_mhz": 2619.0,
            "power_w": 690.5,
            "temperature_c": 61.0,
        }
    ],
}
