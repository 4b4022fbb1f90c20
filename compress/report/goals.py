"""Goals: the limits of the recipe against the figures of the report.

Every goal is judged on the point estimate. A goal whose figure was not measured is neither met nor missed: its value is None and its
reason says what is missing. All figures come from one report, so a ratio never mixes two runs.

A limit on what accuracy is lost says nothing where a model that knows nothing keeps within it (`foundation.measure.chance`), as where the
baseline is no better than that. Such a goal is not judged either.

A latency row that other work on the machine spoiled is marked `busy` (`foundation.measure.latency`). A goal that depends on such a row is
not judged, and the run ends with exit status 4.

Goals are judged on what is served (`compress.report.served`): one variant in one engine, mode and float precision.

    max_drop      baseline in torch - the served model in its last backend (a server, else its engine, else torch);
                  for perplexity the relative increase, served / baseline - 1
    max_disagreement the bound that the cascade certifies
    max_latency_ms of the engine, or of requests to the server if the goal says so; both are shown next to the verdict
    max_bleu_drop BLEU of the baseline in torch - BLEU of the last variant in the engine that answers, both greedy
    min_speedup   min over shapes of p50(baseline, torch fp32 eager) / p50(served), formed within turns (`foundation.measure.turns`)
    int8_faster   p50(float) / p50(int8) at the largest shape, each in its fastest engine; met above 1. It is judged whichever of them is
                  served: as a goal where the recipe sets it, else it is a finding, which nothing misses. The float model is the one that
                  was quantized, so both have the same layer shapes. On a GPU its engines count in fp16 and bf16, and torch too, eager and
                  compiled: all of these are timed there. Not judged for w4a16 and fp8
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from compress.report.model.contents import Contents, Goal
from compress.report.model.variant import Latency, Variant
from foundation.artifacts.figures import Accuracy, Drop, Quality
from foundation.artifacts.triton import Limit
from foundation.core.engines import REFERENCE, SERVERS
from foundation.core.goals import Goals, LatencyGoal
from foundation.machine.environment import NATIVE_INT8
from foundation.measure.judged import known_metric
from foundation.measure.samples import WAITED
from foundation.measure.turns import ratio
from foundation.schemes.table import of_precision

FLOATS = ("fp32", "bf16", "fp16")
ROUNDING = 1e-9  # 0.9 - 0.89 is 0.010000000000000009: a drop of 0.01 must meet a limit of 0.01

Shape = tuple[int, int | None]
NOTHING = Variant()
"""The variant of a report without variants."""


@dataclass(frozen=True)
class Figure:
    """The figure that a goal is judged on, or the reason why there is none."""

    value: float | None = None
    at: str | None = None
    """Where it was measured, for readers."""
    reason: str | None = None
    low: float | None = None
    high: float | None = None
    judged: bool = True
    """Whether a limit on it is meaningful."""
    busy: bool = False
    """Whether other work on the machine spoiled the measurement."""


def judge(goals: Goals, report: Contents) -> list[Goal]:
    """Judges the goals of a recipe.

    Args:
        goals: The goals; one that is not set is not judged.
        report: The report; this reads `variants`, `baseline`, `metric`, `target.engines` and `environment.cpu_features`.

    Returns:
        The goals that are set, each with its verdict: `met` is None where it is not judged, `busy` is true where the machine was too busy.
    """
    judged = [
        _at_most("max_drop", goals.max_drop, _telling(drop(report), goals.max_drop, *chance_drop(report))),
        _at_most("max_disagreement", goals.max_disagreement, certified(report)),
        at_least("min_speedup", goals.min_speedup, speedup(report)),
        *(_latency_goal(report, goal) for goal in goals.max_latency_ms),
        _at_most("max_size_mb", goals.max_size_mb, size_mb(report)),
        at_least("min_throughput", goals.min_throughput, throughput(report)),
        _at_most("max_bleu_drop", goals.max_bleu_drop, _telling(bleu_drop(report), goals.max_bleu_drop, *chance_bleu(report))),
    ]
    if goals.int8_faster is True:
        judged += _int8_faster(report)
    return [goal for goal in judged if goal.limit is not None]


def findings(goals: Goals, report: Contents) -> list[Goal]:
    """Returns the findings that the report shows like goals: `int8_faster`, unless the recipe sets that goal."""
    return _int8_faster(report) if goals.int8_faster is None else []


def _int8_faster(report: Contents) -> list[Goal]:
    if not is_int8(last_variant(report)):
        return []
    return [_judged("int8_faster", 1.0, int8_gain(report), lambda value, limit: value > limit)]


def missed(report: Contents) -> list[str]:
    """Returns the goals that were judged and not met."""
    return [_key(goal) for goal in report.goals if goal.met is False]


def unjudged_busy(report: Contents) -> list[str]:
    """Returns the goals that were not judged because the machine was busy."""
    return [_key(goal) for goal in report.goals if goal.busy]


def _key(goal: Goal) -> str:
    """Returns the key of a goal below `goals` in the recipe."""
    return str(goal.goal) if goal.variant is None else f"variants.{goal.variant}.{goal.goal}"


def last_variant(report: Contents) -> Variant:
    """Returns the last variant of the run; an empty one if there is none."""
    return report.variants[-1] if report.variants else NOTHING


def served_variant(report: Contents) -> Variant:
    """Returns the served variant; the last one in reports that do not record it."""
    name = None if report.served is None else report.served.variant
    return next((variant for variant in report.variants if variant.id == name), last_variant(report))


def baseline(report: Contents) -> Variant:
    """Returns the variant that all others are compared with; an empty one if there is none."""
    return next((variant for variant in report.variants if variant.id == report.baseline), NOTHING)


def served_engine(report: Contents) -> str | None:
    """Returns the engine that goals judge; in reports without a served configuration the first of the target, else the first
    measured one other than torch."""
    if report.served is not None:
        return report.served.engine
    measured = [row.engine for row in last_variant(report).latency if row.engine]
    return next(iter([*report.target.engines, *(engine for engine in measured if engine != REFERENCE), *measured]), None)


def is_quantized(variant: Variant) -> bool:
    """Whether a variant went through a quantize stage."""
    named = "quantize" in variant.stages or bool(variant.quantization)
    return named or any(row.precision not in (*FLOATS, None) for row in variant.latency)


def is_int8(variant: Variant) -> bool:
    """Whether a variant was quantized to int8: not to numbers that are multiplied in float, and not to FP8."""
    return is_quantized(variant) and all(_counts_int8(str(row.precision)) for row in variant.latency)


def _counts_int8(precision: str) -> bool:
    """Whether engines of this precision multiply int8, or are float rivals of one that does."""
    row = of_precision(precision)
    return row is None or (row.numbers == "int8" and row.activations != "float")


def last_backend(report: Contents) -> str | None:
    """Returns the last backend that evaluated the served model: a server, else its engine, else another, else torch."""
    measured = [backend for backend, cell in served_accuracy(report).items() if cell.value is not None]
    engines = [backend for backend in measured if backend not in (*SERVERS, REFERENCE)]
    return next((backend for backend in [*SERVERS, served_engine(report), *engines, REFERENCE] if backend in measured), None)


def served_accuracy(report: Contents) -> Mapping[str, Accuracy]:
    """Returns the primary metric of the served model by backend; in its engines it is measured on exactly what is served."""
    cells, own = served_variant(report).accuracy, None if report.served is None else report.served.accuracy
    return cells if own is None else {**{name: cell for name, cell in cells.items() if name == REFERENCE}, **own}


def accuracy(report: Contents) -> Accuracy:
    """Returns the primary metric of the served model in the last backend that evaluated it."""
    backend = last_backend(report)
    return Accuracy() if backend is None else served_accuracy(report)[backend]


def served_drops(report: Contents) -> Mapping[str, Drop]:
    """Returns the loss of the served model by backend; in engines it is the loss of exactly the served configuration."""
    return {**served_variant(report).drops, **({} if report.served is None else report.served.drops)}


def before(report: Contents) -> Accuracy:
    """Returns the primary metric of the baseline in torch."""
    return baseline(report).accuracy.get(REFERENCE, Accuracy())


def drop(report: Contents) -> Figure:
    """Returns the loss in the primary metric over the whole run; positive is a loss."""
    first, backend = before(report), last_backend(report)
    if first.value is None:
        return Figure(reason=f"the baseline was not evaluated in torch{_because(first.reason)}")
    if backend is None:
        return Figure(reason="the served model was not evaluated in any backend")
    after, paired = served_accuracy(report)[backend], served_drops(report).get(backend, Drop())
    if first.n != after.n:
        counts = ["an unknown number of" if cell.n is None else cell.n for cell in (first, after)]
        return Figure(reason=f"the baseline was evaluated on {counts[0]} rows, {backend} on {counts[1]}")
    assert after.value is not None, "the last backend has a value"
    known = known_metric(report.metric.name)
    if known is not None:
        lost = known.drop(first.value, after.value)
    else:
        lost = (-1 if report.metric.higher_is_better is False else 1) * (first.value - after.value)
    return Figure(lost, at=backend, low=paired.low, high=paired.high)


def certified(report: Contents) -> Figure:
    """Returns the share of other answers that the cascade of the run certifies."""
    if report.cascade is None:
        return Figure(reason="no stage certified a bound: add `- cascade: {max_disagreement: ...}`")
    certificate = report.cascade.certificate
    return Figure(float(certificate.bound), at=f"cascade, confidence {certificate.confidence:g}")


def chance_drop(report: Contents) -> tuple[float | None, str]:
    """Returns the loss of a model that ignores its input against the baseline in the primary metric, and both figures in words; None in
    reports that do not say."""
    value, metric = before(report).value, report.metric
    known = known_metric(metric.name)
    if value is None or metric.chance is None or known is None:
        return None, ""
    told = f"a model that knows nothing gets {metric.name} {metric.chance:.4g}, the baseline {value:.4g}"
    return known.drop(value, metric.chance), told


def knows_nothing(value: float | None, report: Contents) -> bool:
    """Whether a value of the primary metric is no better than the value of a model that ignores its input (`metric.chance`)."""
    chance, known = report.metric.chance, known_metric(report.metric.name)
    if value is None or chance is None or known is None:
        return False
    return value <= chance if known.higher_is_better else value >= chance


def chance_bleu(report: Contents) -> tuple[float | None, str]:
    """Returns the BLEU loss of answers that do not depend on their source against the baseline, and both figures in words."""
    worth = _answered(report)[1]
    if worth is None or worth.bleu_chance is None:
        return None, ""
    told = f"answers that do not depend on their source get BLEU {worth.bleu_chance:.2f}, the baseline {worth.bleu_before:.2f}"
    return worth.bleu_before - worth.bleu_chance, told


def is_relative(metric: str | None) -> bool:
    """Whether the drop of a metric is relative to its value before (perplexity) and not a difference."""
    known = known_metric(metric)
    return known is not None and known.relative


def speedup(report: Contents) -> Figure:
    """Returns the speed-up of the served model at the worst shape, against the baseline in torch, fp32, eager, on the same device."""
    engine = served_engine(report)
    fast = served_cells(report)
    if not fast:
        return Figure(reason=_unmeasured(report, engine))
    device = next(iter(fast.values())).device
    slow = reference_cells(report, device)
    if not slow:
        return Figure(reason="the baseline was not timed in torch (fp32, eager) on this device")
    return least_ratio(slow, fast, engine, "torch (baseline)")


def least_ratio(slow: Mapping[Shape, Latency], fast: Mapping[Shape, Latency], engine: str | None, reference: str) -> Figure:
    """Returns the smallest ratio of two models' latencies over all shapes.

    Args:
        slow: Latency rows of the reference by shape.
        fast: Latency rows of the model, at least one.
        engine: Engine of the model, for messages.
        reference: Name of the reference, for messages.
    """
    missing = sorted(fast.keys() ^ slow.keys(), key=str)
    if missing:
        return Figure(reason=f"{shape_name(missing[0])} was not timed in both {engine} and {reference}")
    ratios = {shape: ratio(slow[shape], fast[shape]) for shape in fast}
    worst = min(ratios, key=lambda shape: ratios[shape].value)
    found = ratios[worst]
    figure = Figure(found.value, at=f"{engine}, {shape_name(worst)}", low=found.low, high=found.high)
    return _steady(figure, *slow.values(), *fast.values())


def latency(report: Contents, goal: LatencyGoal) -> Figure:
    """Returns one latency percentile of the served model.

    Args:
        report: The report.
        goal: The limit on it.
    """
    shape = goal.batch, goal.sequence
    cells, engine = served_cells(report), served_engine(report)
    where = f"{engine}, p{goal.percentile}, {shape_name(shape)}"
    if not cells:
        return Figure(at=where, reason=_unmeasured(report, engine))
    if shape not in cells:
        measured = ", ".join(shape_name(known) for known in sorted(cells, key=_work))
        return Figure(at=where, reason=f"this shape was not measured; measured shapes: {measured}")
    value = _percentile(cells[shape], goal.percentile)
    if value is None:
        return Figure(at=where, reason=_too_few(cells[shape], goal))
    low, high = (cells[shape].interval_ms or (None, None)) if goal.percentile == 50 else (None, None)
    return _steady(Figure(value, at=where, low=low, high=high), cells[shape])


def _percentile(row: Latency | Limit, percentile: int) -> float | None:
    return {50: row.p50_ms, 90: row.p90_ms, 99: row.p99_ms}[percentile]


def server_latency(report: Contents, goal: LatencyGoal) -> Figure:
    """Returns one latency percentile of requests to the served model in its server; arguments as above."""
    shape = goal.batch, goal.sequence
    one = report.served
    wanted = None if one is None else (one.variant, one.precision, one.engine, one.mode)
    same = [model for model in report.triton.models if (model.variant, model.precision, model.engine, model.mode) == wanted]
    server = same[0].server if same else next(iter(SERVERS))
    where = f"{server}, p{goal.percentile}, {shape_name(shape)}"
    rows = [row for model in same for row in model.limits if (row.batch, row.sequence) == shape]
    if not rows:
        return Figure(at=where, reason="no server was timed at this shape")
    value = _percentile(rows[0], goal.percentile)
    if value is None:
        return Figure(at=where, reason=rows[0].reason or _too_few(rows[0], goal))
    waited = rows[0].waited
    if waited is None or waited <= WAITED:
        return Figure(value, at=where)
    seen = f"machine busy: server and client waited for a core in {100 * waited:.0f} % of the time in which they could have run"
    reason = f"{seen}; `compress run RECIPE --from triton_repo` measures again"
    return Figure(value, at=where, judged=False, busy=True, reason=reason)


def _too_few(row: Latency | Limit, goal: LatencyGoal) -> str:
    return f"{row.n or 'the'} samples are too few for a p{goal.percentile}"


def _latency_goal(report: Contents, goal: LatencyGoal) -> Goal:
    """Judges a limit on latency in the engine or the server; both figures are shown next to the verdict."""
    found = {"engine": latency(report, goal), "server": server_latency(report, goal)}
    judged = _at_most("max_latency_ms", goal.value, found[goal.at])
    return judged.with_(judged_at=goal.at, engine_ms=found["engine"].value, server_ms=found["server"].value)


def size_mb(report: Contents) -> Figure:
    """Returns the deployed size, the files that the engine of the served model loads, in 10^6 bytes."""
    size, engine = served_size(report), served_engine(report)
    return Figure(size / 1e6, at=engine) if size is not None else Figure(reason=f"no files were built for {engine or 'any engine'}")


def served_size(report: Contents) -> int | None:
    """Returns the bytes that the engine of the served model loads; None where none was built."""
    return served_variant(report).size_bytes if report.served is None else report.served.size_bytes


def throughput(report: Contents) -> Figure:
    """Returns the rows per second of the served model at its best shape."""
    rates = {shape: row.throughput_per_s for shape, row in served_cells(report).items() if row.throughput_per_s is not None}
    if not rates:
        return Figure(reason=_unmeasured(report, served_engine(report)))
    best = max(rates, key=lambda shape: rates[shape])
    return _steady(Figure(rates[best], at=f"{served_engine(report)}, {shape_name(best)}"), *served_cells(report).values())


def bleu_drop(report: Contents) -> Figure:
    """Returns the BLEU loss of the last variant against the float baseline, in points, in the first engine that answers."""
    engine, worth = _answered(report)
    if worth is None:
        return Figure(reason="no engine answered the evaluation sources")
    low, high = worth.bleu_change or (None, None)
    value = worth.bleu_before - worth.bleu
    return Figure(value, at=engine, low=None if high is None else -high, high=None if low is None else -low)


def _answered(report: Contents) -> tuple[str | None, Quality | None]:
    """Returns the first engine of the last variant whose answers were compared with references, and its figures; None where none was."""
    answers = last_variant(report).answers
    return next(((engine.engine, engine.quality) for engine in answers if engine.quality is not None), (None, None))


def int8_gain(report: Contents) -> Figure:
    """Returns how many times faster the fastest int8 engine is than the fastest float one, at the largest batch and sequence."""
    last = last_variant(report)
    engines = {str(row.engine) for row in last.latency} - {REFERENCE}
    int8 = [row for engine in engines for row in _measured(last, engine) if row.precision not in (*FLOATS, None)]
    if not int8:
        return Figure(reason=_unmeasured(report, served_engine(report)))
    shape = max((row.shape for row in int8), key=_work)
    behind = [variant for variant in report.variants if not is_quantized(variant) and variant.id in last.stages]
    floating = behind[-1] if behind else NOTHING
    rivals = [row for row in floating.latency if row.p50_ms and (row.engine in engines or _on_gpu(row))]
    same = [row for row in rivals if row.shape == shape]
    if not same:
        return Figure(reason=f"the float model was not timed at {shape_name(shape)}")
    best, rival = (min(rows, key=lambda row: row.p50_ms or 0.0) for rows in ([row for row in int8 if row.shape == shape], same))
    gain = ratio(rival, best)
    where = f"{best.engine}, {shape_name(shape)}, against {rival.precision}"
    where += "" if rival.engine == best.engine else f" in {rival.engine}"
    where += " compiled" if rival.mode == "compiled" else ""
    reason = None if gain.value > 1 else _blame(last, report.environment.cpu_features)
    return _steady(Figure(gain.value, at=where, low=gain.low, high=gain.high, reason=reason), rival, best)


def served_cells(report: Contents) -> dict[Shape, Latency]:
    """Returns the latency rows of the served model by shape; in reports that do not say what is served, of the last variant in the first
    engine, quantized if it has such rows."""
    rows, one = _measured(served_variant(report), served_engine(report)), report.served
    if one is not None:
        wanted = (one.precision, one.float_precision, one.mode)
        return _first_by_shape([row for row in rows if (row.precision, row.float_precision, row.mode) == wanted])
    precision = next((row.precision for row in rows if row.precision not in FLOATS), None)
    precision = precision or (rows[0].precision if rows else None)
    return _first_by_shape([row for row in rows if row.precision == precision])


def reference_cells(report: Contents, device: str | None) -> dict[Shape, Latency]:
    """Returns the latency rows that speed-ups refer to, by shape: baseline in torch, fp32, eager, same device."""
    rows = _measured(baseline(report), REFERENCE)
    return _first_by_shape([row for row in rows if (row.precision, row.mode, row.device) == ("fp32", "eager", device)])


def shape_name(shape: Shape) -> str:
    """Returns the name of a shape: `batch 8 x 128 tokens`, or `batch 8` for images."""
    batch, sequence = shape
    return f"batch {batch}" if sequence is None else f"batch {batch} x {sequence} tokens"


def _measured(variant: Variant, engine: str | None) -> list[Latency]:
    return [row for row in variant.latency if row.engine == engine and row.p50_ms]


def _on_gpu(row: Latency) -> bool:
    """Whether torch ran on a GPU, where it has fused 16-bit kernels; on a CPU it does not compete with the engines."""
    return row.engine == REFERENCE and row.device == "cuda"


def _first_by_shape(rows: list[Latency]) -> dict[Shape, Latency]:
    # the recommended mode of a shape comes first
    return {row.shape: row for row in reversed(rows)}


def _work(shape: Shape) -> tuple[int, int]:
    return shape[0] * (shape[1] or 1), shape[0]


def _unmeasured(report: Contents, engine: str | None) -> str:
    if engine is None:
        return "no engine was timed"
    cell = last_variant(report).accuracy.get(engine, Accuracy())
    return f"{engine} was not timed{_because(cell.reason)}"


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else ""


def _blame(variant: Variant, cpu_features: Sequence[str] | None) -> str:
    """Explains why int8 is not faster: a processor without int8 dot products, and the layers that ran in float by their share of MACs."""
    lacking = cpu_features is not None and NATIVE_INT8.isdisjoint(cpu_features)
    machine = "; this processor has neither VNNI nor AMX, so int8 GEMMs cost as much as float GEMMs" if lacking else ""
    layers = [(layer, layer.macs) for layer in variant.int8_layers if layer.macs]
    total = sum(macs for _, macs in layers)
    slow = sorted(((layer, macs) for layer, macs in layers if layer.precision in FLOATS), key=lambda pair: -pair[1])
    if not layers:
        return f"not faster than float; the engine does not report which layers ran in int8{machine}"
    if not slow:
        return f"not faster than float although every layer ran in int8{machine}"
    named = ", ".join(f"{layer.name} ({100 * macs / total:.1f} % of MACs)" for layer, macs in slow[:5])
    return f"not faster than float{machine}; layers that ran in float: {named}{f' and {len(slow) - 5} more' if len(slow) > 5 else ''}"


def _telling(figure: Figure, limit: float | None, least: float | None, reason: str) -> Figure:
    """Returns a loss that is not judged if a model that ignores its input, which loses `least`, meets the limit."""
    if figure.value is None or limit is None or least is None or least > limit + ROUNDING:
        return figure
    return replace(figure, judged=False, reason=f"{reason}: it would meet the goal too")


def _steady(figure: Figure, *rows: Latency) -> Figure:
    """Returns a figure that is not judged where one of the latency rows that it depends on is `busy`."""
    spoiled = [row for row in rows if row.busy]
    if not spoiled:
        return figure
    shares = [row.disturbed for row in spoiled if row.disturbed is not None]
    seen = f"threads waited for a core in {100 * max(shares):.0f} % of the samples" if any(shares) else "turns differed too much"
    first = min(spoiled, key=lambda row: _work(row.shape))
    reason = f"machine busy: {seen} of {first.engine} at {shape_name(first.shape)}; `compress bench RUN` measures again"
    return replace(figure, judged=False, busy=True, reason=reason)


def _at_most(goal: str, limit: float | None, figure: Figure) -> Goal:
    return _judged(goal, limit, figure, lambda value, bound: value <= bound + ROUNDING)


def at_least(goal: str, limit: float | None, figure: Figure) -> Goal:
    """Judges a lower bound on a figure."""
    return _judged(goal, limit, figure, lambda value, bound: value >= bound - ROUNDING)


def _judged(goal: str, limit: float | None, figure: Figure, holds: Callable[[float, float], bool]) -> Goal:
    met = None if figure.value is None or limit is None or not figure.judged else bool(holds(figure.value, limit))
    known = {key: getattr(figure, key) for key in ("at", "low", "high", "reason") if getattr(figure, key) is not None}
    return Goal(goal=goal, limit=limit, value=figure.value, met=met, **known, **({"busy": True} if figure.busy else {}))
