"""Time of one unit of each part of a step on this machine, before any run was recorded (`compress.run.expected` lists the parts)."""

from __future__ import annotations

from compress.run.speed import Speed

USED = 0.55
"""Share of the speed of a large product that the products of a model reach."""
LOOP_S = 0.04
"""Seconds of the loop of `compress.run.speed` on the machine that the constants are of."""
START_S = {"model": 0.5, "evaluate": 0.5, "finetune": 1.5, "distill": 2.0, "prune": 4.0, "sparsify": 4.0, "quantize": 2.0}
TRACED = 40.0
"""How much longer export takes for a byte than writing it: the graph is traced, rewritten, hashed and read again."""


def seconds_of_one(stage: str, known: Speed) -> dict[str, float]:
    """Returns the seconds of one of each part.

    Args:
        stage: Name of the stage.
        known: The speed of the machine.
    """
    slow, product = known.python_s / LOOP_S, 1 / (USED * known.macs_per_s)
    return {
        "start": slow * START_S.get(stage, 2.0),
        "macs": product,
        "bytes": (TRACED if stage == "export" else 2.0) / known.written_per_s,
        "builds": slow * 4.0,
        "engines": slow * 3.0,
        "sampled": 1.0,
        "served": slow * 10.0,
        "asked": slow * 2e-3,
    }
