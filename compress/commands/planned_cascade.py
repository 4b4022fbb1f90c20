"""The line of a plan about a cascade: the mean time of a row, from an expected share of rows that go on.

    mean = t_1 + s t_2 + s^2 t_3,   s = `EXPECTED_SHARE` at every tier,   t = `CALL_S` + multiply-accumulates of a row / speed of an engine

The share is what small classifiers came to at a bound of 1 % (`benchmarks/README.md`); the stage measures it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compress.commands.remembered import CountedStep
from compress.recipe import Recipe
from compress.run.pace import CALL_S, seconds_of_one
from compress.run.speed import Speed
from export.cascade.cascade import Cascade
from foundation.core.step_names import BASELINE
from foundation.machine.environment import NATIVE_INT8, hardware

EXPECTED_SHARE = 0.15
INTEGERS, INTEGERS_ALONE = 0.5, 0.8
"""Time of a quantized model over its float model, on a processor with instructions for int8 and on others."""


def lines(recipe: Recipe, steps: Sequence[CountedStep], known: Speed) -> Iterator[str]:
    """Yields the line about the cascade of a recipe; nothing without one.

    Args:
        recipe: The recipe.
        steps: Its counted steps.
        known: The speed of the machine.
    """
    stage = next((stage for stage in recipe.stages if isinstance(stage, Cascade)), None)
    models = {step["id"]: step for step in steps if step["flops"] is not None}
    if stage is None or len(models) < 2:
        return
    original = next((step["id"] for step in models.values() if step["stage"] == "finetune"), next(iter(models)))
    names = [original if name == BASELINE else name for name in stage.tiers or (list(models)[-1], BASELINE)]
    times = [1e3 * _seconds(models[name], known) for name in names]
    mean = sum(time * EXPECTED_SHARE**place for place, time in enumerate(times))
    ways = " to ".join(f"{name} ({time:.2g} ms)" for name, time in zip(names, times, strict=True))
    yield f"{stage.id}: a row takes about {mean:.2g} ms on average if {EXPECTED_SHARE:.0%} of the rows go on from {ways}"


def _seconds(step: CountedStep, known: Speed) -> float:
    """Returns the time of a row in an engine."""
    share = 1.0
    if step["stage"] == "quantize":
        share = INTEGERS_ALONE if NATIVE_INT8.isdisjoint(hardware()["cpu_features"]) else INTEGERS
    return CALL_S + share * float(step["flops"] or 0) / 2 * seconds_of_one("latency", known)["macs"]
