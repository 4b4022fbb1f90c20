"""The verdicts of `make gpu-check`: what was measured on a machine with GPUs, held against what is asked of it.

    model            line                                                             at least
    BERT-large       int8 against our fp16, plans timed in turns                      1.6 at 32 x 128 and 32 x 384, 1.0 at 1 x 128
                     int8 against torch eager fp16                                    10.9 at 1 x 128, 2.0 at 32 x 128
                     int8 against torch.compile fp16                                  told, without a limit
    each             parity of every plan with the golden logits of torch             passed
                     metric of the baseline minus that of the server                  at most `max_drop` of the recipe
                     MACs of weight GEMMs that the plan runs in int8                  0.95
                     rows per second of all GPUs / (GPUs x rows per second of one)    0.9; told with a single GPU

What was not measured is a verdict too: it did not pass, and says why. The two ratios with torch are those of the run, the first is that of
`plans.json`: a ratio never mixes two measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.kernel_verdicts import kernel_verdicts
from benchmarks.gpu.verdict import Verdict
from foundation.core.engines import REFERENCE, served_on

Measurements = Mapping[str, Any]
"""What `benchmarks.gpu.check` measured of one model: `latency` (rows of the run), `plans` (of plans.json), `rival` precision,
`accuracy`, `scaling`, and `error`, what has ended it, or None."""
OUR_FP16 = {(32, 128): 1.6, (32, 384): 1.6, (1, 128): 1.0}
EAGER_FP16 = {(1, 128): 10.9, (32, 128): 2.0}
INT8_SHARE, SCALING = 0.95, 0.9
SPEED = "bert-large-random-cuda"
"""The recipe whose speed is judged."""
NO_PLAN = "no plan was built"


def verdicts(models: Mapping[str, Measurements], kernels: Mapping[str, Any] | None = None) -> list[Verdict]:
    """Returns every line of the table.

    Args:
        models: What was measured, by name of the recipe.
        kernels: What was measured of our own kernels (`kernel_verdicts`); None: they are not asked for.
    """
    lines = [line for name, found in models.items() for line in (*_speeds(name, found), *_others(name, found))]
    return lines if kernels is None else [*lines, *kernel_verdicts(kernels)]


def _speeds(name: str, found: Measurements) -> Iterator[Verdict]:
    if name != SPEED:
        return
    for shape, limit in OUR_FP16.items():
        value, reason = beside_rival(found["plans"], shape)
        yield Verdict(name, f"int8 against our fp16, {_shown(shape)}", value, limit, reason=_why(found, reason))
    for shape, limit in EAGER_FP16.items():
        value, reason = over_torch(found["latency"], "eager", shape)
        yield Verdict(name, f"int8 against torch eager fp16, {_shown(shape)}", value, limit, reason=_why(found, reason))
    for shape in OUR_FP16:
        value, reason = over_torch(found["latency"], "compiled", shape)
        yield Verdict(name, f"int8 against torch.compile fp16, {_shown(shape)}", value, None, reason=reason or "no limit is set")


def _others(name: str, found: Measurements) -> Iterator[Verdict]:
    for capability, plan in sorted(found["plans"].items()):
        yield Verdict(name, f"parity, sm{capability}", float(plan["parity"]["passed"]), 1.0)
        share = plan["int8_share"]
        reason = None if share is not None else "the precision of a GEMM, or its MACs, are not known"
        yield Verdict(name, f"int8 share, sm{capability}", share, INT8_SHARE, reason=reason)
    if not found["plans"]:
        yield Verdict(name, "parity", None, 1.0, reason=found["error"] or NO_PLAN)
        yield Verdict(name, "int8 share", None, INT8_SHARE, reason=found["error"] or NO_PLAN)
    accuracy, scaling = found["accuracy"], found["scaling"]
    drop = None if accuracy["served"] is None else accuracy["baseline"] - accuracy["served"]
    reason = accuracy["reason"] if drop is not None else found["error"]
    yield Verdict(name, "drop of the metric in the server", drop, accuracy["max_drop"], at_most=True, reason=reason)
    ratio = None if scaling["one"] is None or scaling["all"] is None else scaling["all"] / (scaling["gpus"] * scaling["one"])
    several = scaling["gpus"] > 1
    reason = None if several else "one GPU: there is nothing to scale to"
    reason = found["error"] if ratio is None else reason
    yield Verdict(name, f"scaling to {scaling['gpus']} GPUs", ratio, SCALING if several else None, reason=reason)


def beside_rival(plans: Mapping[str, Any], shape: tuple[int, int]) -> tuple[float | None, str | None]:
    """Returns how many times as fast as our fp16 the plan is at a shape, on the GPU where that is least; or None and why.

    Args:
        plans: Records of plans.json by capability.
        shape: (batch, sequence).
    """
    if not plans:
        return None, NO_PLAN
    values = []
    for capability, plan in plans.items():
        rival = plan["rival"]
        if rival["precision"] != "fp16":
            return None, f"sm{capability}: timed beside {rival['precision'] or 'nothing'}; {rival['reason'] or 'fp16 was asked for'}"
        row = next((row for row in plan["latency"] if (row["batch"], row["sequence"]) == shape), None)
        if row is None or row["speedup"] is None:
            return None, f"sm{capability}: {_shown(shape)} was not timed; {rival['reason'] or 'target has other shapes'}"
        values.append(row["speedup"])
    return min(values), None


def over_torch(rows: Sequence[Mapping[str, Any]], mode: str, shape: tuple[int, int]) -> tuple[float | None, str | None]:
    """Returns how many times as fast as torch in fp16 the int8 plan was in the run at a shape; or None and why.

    Args:
        rows: Latency rows of the run: `engine`, `mode`, `precision`, `batch`, `sequence`, `p50_ms`.
        mode: eager or compiled.
        shape: (batch, sequence).
    """
    at = [row for row in rows if (row["batch"], row["sequence"]) == shape]
    plan = [row["p50_ms"] for row in at if row["engine"] == served_on("cuda")[0] and row["precision"] == "int8"]
    torch = [row["p50_ms"] for row in at if row["engine"] == REFERENCE and row["mode"] == mode and row["precision"] == "fp16"]
    for times, what in ((plan, "an int8 plan"), (torch, f"torch {mode} in fp16")):
        if not times:
            return None, f"the run did not time {what} at {_shown(shape)}"
    return min(torch) / min(plan), None


def _why(found: Measurements, reason: str | None) -> str | None:
    """Returns why nothing was measured: what has ended the check of this model, if anything did."""
    return reason if reason is None or found["error"] is None else str(found["error"])


def _shown(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]}"
