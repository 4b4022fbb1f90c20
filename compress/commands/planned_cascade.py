"""The line of a plan about a cascade: the mean time of a row, from the expected shares of rows that reach each tier.

    mean = sum_k s_k t_k,   s_1 = 1,   t = `CALL_S` + multiply-accumulates of a row / speed of an engine

The shares are those of the last cascade of the same models in the run folder. Its tested path also answers another bound or confidence:
the point is taken that its certificate rows allow. Without such a cascade s_k = `EXPECTED_SHARE`^(k - 1), which is what small classifiers
came to at a bound of 1 % (`benchmarks/README.md`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from compress.commands.remembered import CountedStep
from compress.recipe import Recipe
from compress.run.pace import CALL_S, seconds_of_one
from compress.run.speed import Speed
from export.cascade.cascade import Cascade
from export.cascade.certificate import binomial_p, fixed_sequence
from foundation.artifacts import cascade as document
from foundation.artifacts.document import read
from foundation.core.step_names import BASELINE
from foundation.machine.environment import NATIVE_INT8, hardware

EXPECTED_SHARE = 0.15
INTEGERS, INTEGERS_ALONE = 0.5, 0.8
"""Time of a quantized model over its float model, on a processor with instructions for int8 and on others."""


def lines(recipe: Recipe, steps: Sequence[CountedStep], known: Speed, folder: Path) -> Iterator[str]:
    """Yields the line about the cascade of a recipe; nothing without one.

    Args:
        recipe: The recipe.
        steps: Its counted steps.
        known: The speed of the machine.
        folder: The run folder.
    """
    stage = next((stage for stage in recipe.stages if isinstance(stage, Cascade)), None)
    models = {step["id"]: step for step in steps if step["flops"] is not None}
    if stage is None or len(models) < 2:
        return
    original = next((step["id"] for step in models.values() if step["stage"] == "finetune"), next(iter(models)))
    wanted = None if stage.tiers is None else [original if name == BASELINE else name for name in stage.tiers]
    earlier = _earlier(folder, wanted, models)
    if earlier is None:
        names = wanted or [list(models)[-1], original]
        shares, source = [EXPECTED_SHARE**place for place in range(len(names))], ""
    else:
        names = [tier.variant for tier in earlier.tiers]
        shares, source = _reaching(earlier, stage), ", as in the cascade of an earlier run"
    times = [1e3 * _seconds(models[name], known) for name in names]
    mean = sum(share * time for share, time in zip(shares, times, strict=True))
    ways = "".join(
        f", {share:.0%} go on to {name} ({time:.2g} ms)" for name, time, share in list(zip(names, times, shares, strict=True))[1:]
    )
    yield f"{stage.id}: a row takes about {mean:.2g} ms on average if {names[0]} ({times[0]:.2g} ms) is first{ways}{source}"


def _earlier(folder: Path, names: Sequence[str] | None, models: Mapping[str, CountedStep]) -> document.Cascade | None:
    """Returns the last cascade in a run folder that has these tiers, or any tiers of the recipe; None without one.

    Args:
        folder: The run folder.
        names: Variants of the tiers; None: any that are models of the recipe.
        models: The models of the recipe.

    Raises:
        DamagedArtifact: One cannot be read.
    """
    files = sorted(folder.glob(f"stages/*/{document.FILE}"), key=lambda file: file.stat().st_mtime_ns)
    for file in reversed(files):
        found = read(document.Cascade, file)
        tiers = [tier.variant for tier in found.tiers]
        if set(tiers) <= models.keys() and names in (None, tiers) and found.certificate.path.points:
            return found
    return None


def _reaching(found: document.Cascade, stage: Cascade) -> list[float]:
    """Returns the share of rows that reach each tier at the point that the certificate rows allow for the stage's bound and confidence."""
    certificate = found.certificate
    points = certificate.path.points
    p_values = [binomial_p(point.disagreements, certificate.n, stage.max_disagreement) for point in points]
    last = fixed_sequence(p_values, stage.alpha)
    return [1.0, *(beyond / certificate.n for beyond in points[last or 0].escalated)]


def _seconds(step: CountedStep, known: Speed) -> float:
    """Returns the time of a row in an engine."""
    share = 1.0
    if step["stage"] == "quantize":
        share = INTEGERS_ALONE if NATIVE_INT8.isdisjoint(hardware()["cpu_features"]) else INTEGERS
    return CALL_S + share * float(step["flops"] or 0) / 2 * seconds_of_one("latency", known)["macs"]
