"""Time of one unit of each part of a step on this machine, before any run was recorded (`compress.run.expected` lists the parts)."""

from __future__ import annotations

from compress.run.speed import Speed

ENGINES = 1.3
"""Speed of the engines of a run, on average over their precisions, over a float32 product in torch, where torch has no bfloat16."""
HALVES = 0.85
"""The same over a bfloat16 product in torch, where the processor multiplies it; the engines then have modes of 16 bits too."""
SAMPLED_PER_S = 3.5e10
"""Float32 multiply-accumulates per second of the machine that takes `expected.REFERENCE_SPEED` for its engines."""
CALL_S = 1e-3
"""Seconds of a call of an engine besides its multiply-accumulates, on average over the engines."""
TRAINS = ("finetune", "distill", "prune", "sparsify", "adapters")
"""Stages that compute in the precision of training."""
LOOP_S = 0.04
"""Seconds of the loop of `compress.run.speed` on the machine that the constants are of."""
START_S = {"model": 0.5, "evaluate": 0.5, "finetune": 1.5, "distill": 2.0, "prune": 4.0, "sparsify": 4.0, "compact": 2.0, "quantize": 2.0}
WRITTEN = 3.0
"""How many times longer a product takes for one token of each text of a batch than for whole texts, in torch."""
ANSWERED = 2.0
"""The same in engines, which answer as many prompts at once as they can."""
TRACED_S = 1.85e-7
"""Seconds of export for a byte: the graph is traced, rewritten, hashed, compiled and read again."""


def seconds_of_one(stage: str, known: Speed) -> dict[str, float]:
    """Returns the seconds of one of each part.

    Args:
        stage: Name of the stage.
        known: The speed of the machine.
    """
    slow = known.python_s / LOOP_S
    engines = max(ENGINES * known.macs_per_s, HALVES * known.trained_per_s)
    return {
        "start": slow * START_S.get(stage, 2.0),
        "products": 1 / (known.trained_per_s if stage in TRAINS else known.macs_per_s),
        "macs": 1 / engines,
        "written": WRITTEN / known.macs_per_s,
        "answered": ANSWERED / engines,
        "bytes": slow * TRACED_S if stage == "export" else 2.0 / known.written_per_s,
        "builds": slow * 4.0,
        "engines": slow * 1.6,
        "sampled": 1.0 if stage == "latency" else SAMPLED_PER_S / known.macs_per_s,
        "served": slow * 17.0,
        "asked": slow * 2e-3,
    }
