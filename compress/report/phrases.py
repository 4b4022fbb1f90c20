"""How the report writes numbers, goals and its one-sentence verdict.

Every formatting function accepts None and returns `not measured`. Its docstring says if the caller adds the unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from compress.report import goals
from compress.report.decision import Change, Decision
from compress.report.model.contents import Configuration, Goal
from compress.report.model.variant import Variant
from foundation.artifacts.figures import Accuracy
from foundation.core.engines import ENGINES, SERVERS
from foundation.measure.judged import SEPARATOR, known_metric

NOT_MEASURED = "not measured"
NO_REASON = "no reason was recorded"
DISTANCES = {"kl": "KL of the logits, nats", "mse": "squared error of the output"}

MINUS, TIMES, TO, SPACE = "\u2212", "\u00d7", "\u2013\u2060", "\u00a0"  # no line break after a dash


def engine_name(key: str | None) -> str:
    """Returns the official name of an engine or backend."""
    if not key:
        return "no engine"
    return ENGINES[key].title if key in ENGINES else SERVERS.get(key, str(key))


def is_share(metric: str | None) -> bool:
    """Whether a metric is written in percent with differences in points; correlations are plain numbers."""
    known = known_metric(metric)
    return known is not None and known.is_share


def figure(value: float | None, metric: str | None) -> str:
    """Returns a metric: `89.79 %` for shares, `0.8979` for correlations, `23.41` for perplexity."""
    if value is None:
        return NOT_MEASURED
    if goals.is_relative(metric):
        return f"{value:,.2f}"
    return f"{100 * value:.2f}{SPACE}%".replace("-", MINUS) if is_share(metric) else f"{value:.4f}".replace("-", MINUS)


def interval(low: float | None, high: float | None, metric: str | None) -> str | None:
    """Returns an interval of a metric without its unit: `88.5-92.4`; None if there is none."""
    if low is None or high is None:
        return None
    texts = [
        f"{100 * end:.1f}" if is_share(metric) else f"{end:,.2f}" if goals.is_relative(metric) else f"{end:.3f}" for end in (low, high)
    ]
    return f"{SPACE}{TO}{SPACE}".join(texts).replace("-", MINUS)


def rows(cell: Accuracy) -> str:
    """Returns the number of rows behind a figure: `800`, `800 in 4 groups` if these are too few for an interval, or `800, 12 of the rows
    trained on`."""
    drawn = f" in {cell.groups} groups" if cell.groups is not None and cell.low is None else ""
    return f"{'unknown' if cell.n is None else cell.n}{drawn}" + (f", {cell.in_train} of the rows trained on" if cell.in_train else "")


def is_error(metric: str | None) -> bool:
    """Whether a metric is an error rate: lower is better, and a change is a difference."""
    known = known_metric(metric)
    return known is not None and not known.higher_is_better and not known.relative


def is_recall(metric: str | None) -> bool:
    """Whether a metric is the recall of one class, which a model that always answers this class has in full."""
    return (metric or "").startswith(f"recall{SEPARATOR}")


def headline(metric: str) -> str:
    """Returns the name of a metric at the start of a sentence: `Accuracy`, `Entity F1`, but `NDCG@10`, `WER` and `Recall:LABEL`."""
    if SEPARATOR in metric:
        return metric[:1].upper() + metric[1:]
    return metric.upper() if "@" in metric or is_error(metric) else metric.capitalize().replace("_", " ").replace(" f1", " F1")


def _changed(drop: float, metric: str | None) -> str:
    return _signed(drop, metric) + (f"{SPACE}pt" if is_share(metric) else f"{SPACE}%" if goals.is_relative(metric) else "")


def change(drop: float | None, metric: str | None) -> str | None:
    """Returns a drop as a signed change of the metric: a drop of 0.0046 is `-0.46 pt`, for perplexity `+0.46 %`, for
    error rates `+0.46 pt`."""
    return None if drop is None else _changed(drop, metric)


def change_interval(low: float | None, high: float | None, metric: str | None) -> str | None:
    """Returns the interval of a change from the interval of the drop: ends and signs swap, except for metrics that are better if lower."""
    if low is None or high is None:
        return None
    if goals.is_relative(metric):
        return f"{_signed(low, metric)} to {_signed(high, metric)}{SPACE}%"
    ends = (low, high) if is_error(metric) else (high, low)
    return " to ".join(_signed(end, metric) for end in ends)


def _signed(drop: float, metric: str | None) -> str:
    change = drop if goals.is_relative(metric) or is_error(metric) else -drop
    text = f"{100 * change:+.2f}" if goals.is_relative(metric) or is_share(metric) else f"{change:+.4f}"
    return text.lstrip("+-") if not float(text) else text.replace("-", MINUS)


def signed(value: float) -> str:
    """Returns a number with its sign and two digits after the point."""
    return f"{MINUS if round(value, 2) < 0 else '+'}{abs(value):.2f}"


def milliseconds(value: float | None) -> str:
    """Returns a latency with three significant digits, without its unit."""
    if value is None:
        return NOT_MEASURED
    return f"{value:,.{max(0, 2 - _magnitude(value))}f}"


def rate(value: float | None) -> str:
    """Returns rows per second: three significant digits below 100, no decimals above."""
    return NOT_MEASURED if value is None else milliseconds(value) if value < 100 else f"{value:,.0f}"


def ratio(value: float | None) -> str:
    """Returns a ratio with three significant digits and a multiplication sign."""
    return NOT_MEASURED if value is None else f"{value:,.{max(0, min(2, 2 - _magnitude(value)))}f}{TIMES}"


def share(value: float | None) -> str:
    """Returns a fraction in percent; only exactly 1 is `100 %`, 0.9999 is `99.9 %`."""
    if value is None:
        return NOT_MEASURED
    return f"{100 * value:.0f}{SPACE}%" if value in (0, 1) else f"{min(100 * value, 99.9):.1f}{SPACE}%"


def size(num_bytes: float | None) -> str:
    """Returns a size in units of 10^3, 10^6 or 10^9 bytes."""
    return NOT_MEASURED if num_bytes is None else _scaled(num_bytes, ("bytes", "kB", "MB", "GB"))


def count(value: float | None) -> str:
    """Returns a large number in thousands (k), millions (M) or 10^9 (G)."""
    return NOT_MEASURED if value is None else _scaled(value, ("", "k", "M", "G")).strip()


def tokens_left(shares: Sequence[float]) -> str:
    """Describes the shares of a row's tokens that remain after each block; the share after the last block has no effect."""
    return f"{', '.join(f'{100 * share:.3g} %' for share in shares[:-1])} of a row's tokens remain after each block but the last"


def duration(seconds: float | None) -> str:
    """Returns a time span in its two largest units."""
    if seconds is None:
        return NOT_MEASURED
    if seconds < 60:
        return f"{seconds:.1f}{SPACE}s"
    if seconds < 3600:
        return f"{int(seconds // 60)}{SPACE}min {int(seconds % 60)}{SPACE}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}{SPACE}h {minutes}{SPACE}min"


def moment(written: str | None) -> str | None:
    """Formats an ISO 8601 time for readers, `2026-11-27 19:50 UTC`; returns other texts unchanged."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\dZ", written or "")
    return f"{found[1]} {found[2]} UTC" if found else written


def _scaled(value: float, units: tuple[str, str, str, str]) -> str:
    power = 0 if abs(value) < 999.5 else 1 if abs(value) < 999.5e3 else 2 if abs(value) < 999.5e6 else 3
    scaled = value / 1000**power
    digits = 0 if power == 0 else max(0, min(2, 2 - _magnitude(scaled)))
    return f"{scaled:,.{digits}f}{SPACE}{units[power]}"


def _magnitude(value: float) -> int:
    """Returns the power of ten of a value after rounding to three digits: 0 for 1.0 to 9.99."""
    return int(f"{value:.2e}".partition("e")[2]) if value else 0


def goal_name(goal: Goal, metric: str | None) -> str:
    """Returns a goal as a phrase: the figure and its limit."""
    name, limit = goal.goal, goal.limit
    if name is None or limit is None:
        return f"{name or 'unnamed goal'}, without a limit"
    bounds: dict[str, Callable[[], str]] = {
        "max_drop": lambda: _drop_name(limit, metric),
        "max_disagreement": lambda: f"Other answers than the original's at most {100 * limit:.4g}{SPACE}%",
        "min_speedup": lambda: f"Speed-up {f'over {goal.over}' if goal.over else 'over torch'} of at least {ratio(limit)}",
        "max_latency_ms": lambda: f"Latency of at most {milliseconds(limit)} ms{_judged_at(goal)}",
        "max_size_mb": lambda: f"Deployed size of at most {size(limit * 1e6)}",
        "min_throughput": lambda: f"Throughput of at least {rate(limit)} rows/s",
        "max_bleu_drop": lambda: f"BLEU drop of at most {limit:.2f} points",
        "int8_faster": lambda: "int8 faster than float, each in its fastest engine",
    }
    text = bounds[name]() if name in bounds else f"{name}: {limit}"
    return text if goal.variant is None else f"{goal.variant}: {text}"


def _judged_at(goal: Goal) -> str:
    return f", judged in the {goal.judged_at}" if goal.judged_at else ""


def both_latencies(goal: Goal) -> str | None:
    """Returns the figures of a limit on latency in the engine and through the server; None for other goals, and in older reports."""
    if goal.judged_at is None:
        return None
    known = {"engine": goal.engine_ms, "server": goal.server_ms}
    return ", ".join(f"{name} {NOT_MEASURED if value is None else f'{milliseconds(value)} ms'}" for name, value in known.items())


def _drop_name(limit: float, metric: str | None) -> str:
    name = headline(metric or "metric")
    if goals.is_relative(metric):
        return f"{name} increase of at most {100 * limit:.2f}{SPACE}%"
    return f"{name} {'increase' if is_error(metric) else 'drop'} of at most {_points(limit, metric)}"


def goal_value(goal: Goal, metric: str | None) -> str:
    """Returns the measured value of a goal in the unit of its limit."""
    name, value = goal.goal, goal.value
    if value is None:
        return NOT_MEASURED
    if name == "max_drop":
        return str(change(value, metric))
    writers: dict[str, Callable[[], str]] = {
        "max_latency_ms": lambda: f"{milliseconds(value)} ms",
        "max_size_mb": lambda: size(value * 1e6),
        "min_throughput": lambda: f"{rate(value)} rows/s",
        "max_bleu_drop": lambda: f"{signed(-value)} points",
        "max_disagreement": lambda: f"{100 * value:.4g}{SPACE}%",
    }
    return writers[name]() if name in writers else ratio(value) if name in ("min_speedup", "int8_faster") else str(value)


def _points(value: float, metric: str | None) -> str:
    return f"{100 * value:.2f} points" if is_share(metric) else f"{value:.4g}"


def verdict(decision: Decision) -> list[tuple[str, bool]]:
    """Returns the outcome in one sentence: speed-up, size and accuracy loss, and any other metric that lost far more.

    Returns:
        The parts of the sentence, each with whether it is printed bold.
    """
    served = decision.variant
    if served is goals.NOTHING:
        return [("Nothing was measured: the run holds no variant.", False)]
    what = f"The {'quantized ' if goals.is_quantized(served) else ''}model of stage {served.id}"
    if goals.is_int8(served):
        what = f"The int8 model of stage {served.id}"
    if decision.is_baseline:
        what = "The baseline"
    speed, smaller_words = _speed_words(decision.speedup, engine_name(decision.engine)), _size_words(decision.size_ratio)
    gained = [*speed, *([(", ", False)] if speed and smaller_words else []), *smaller_words]
    start = f"{what} is " if gained else f"{what} was not timed"
    if decision.no_better_than is not None:
        return [(start, False), *gained, *_worthless_words(decision), (".", False)]
    other = decision.worst_other
    also = [] if other is None else [(f"; {headline(other.metric)} moves more, from {moved(other)}", False)]
    return [(start, False), *gained, *_cost_words(decision.cost, decision.metric), *also, (".", False)]


def moved(change: Change) -> str:
    """Returns a metric before and after, with its change: `87.71 % to 85.16 % (change -2.55 pt)`."""
    ends = " to ".join(figure(value, change.metric) for value in (change.before, change.after))
    return f"{ends} (change {_changed(change.lost, change.metric)})"


def _speed_words(speedup: goals.Figure, engine: str) -> list[tuple[str, bool]]:
    """Returns the speed-up in words: a bound printed bold, or on a busy machine a plain guess."""
    if speedup.value is None:
        return []
    than = (f" on {engine} than the baseline in torch{' (the machine was busy)' if speedup.busy else ''}", False)
    if speedup.value >= 1:
        return [("perhaps " if speedup.busy else "at least ", False), (f"{ratio(speedup.value)} faster", not speedup.busy), than]
    return [("perhaps " if speedup.busy else "up to ", False), (f"{ratio(1 / speedup.value)} slower", not speedup.busy), than]


def _size_words(smaller: float | None) -> list[tuple[str, bool]]:
    if smaller is None or 0.95 < smaller < 1.05:
        return []
    word = f"{ratio(smaller)} smaller" if smaller > 1 else f"{ratio(1 / smaller)} larger"
    return [(word, True)]


def _cost_words(cost: goals.Figure, metric: str | None) -> list[tuple[str, bool]]:
    if cost.value is None:
        return [(f"; its change in {metric or 'accuracy'} was not measured", False)]
    spread = change_interval(cost.low, cost.high, metric)
    measured = f" (measured in {engine_name(cost.at)}" + (f"; 95{SPACE}% interval of the change {spread})" if spread else ")")
    if round(cost.value, 4) == 0:
        return [(", and leaves ", False), (f"{metric} unchanged", True), (measured, False)]
    if goals.is_relative(metric):
        verb = "lowers" if cost.value < 0 else "raises"
        return [(f", and {verb} {metric} by ", False), (f"{100 * abs(cost.value):.2f}{SPACE}%", True), (measured, False)]
    if is_error(metric):
        verb, amount = "lowers" if cost.value < 0 else "raises", _points(round(abs(cost.value), 4), metric)
        return [(f", and {verb} {headline(str(metric))} by ", False), (amount, True), (measured, False)]
    verb, amount = "gains" if cost.value < 0 else "loses", _points(round(abs(cost.value), 4), metric)
    return [(f", and {verb} ", False), (amount, True), (f" of {metric}{measured}", False)]


def _worthless_words(decision: Decision) -> list[tuple[str, bool]]:
    """Returns that what is served is no better than a model that ignores its input: a small loss against the baseline is no praise then."""
    metric, backend = decision.metric, engine_name(decision.hop)
    figures = f": {metric} {figure(decision.after.value, metric)} in {backend}, against {figure(decision.no_better_than, metric)}"
    return [(", and is ", False), ("no better than a model that knows nothing", True), (figures, False)]


def built_in(variant: Variant) -> str:
    """Returns the engine and precision behind the sizes and shares of a variant; empty if it was not exported."""
    return f"{variant.precision or 'unknown precision'} on {engine_name(variant.engine)}" if variant.engine else ""


def configuration(one: Configuration) -> str:
    """Returns one configuration in words: "quantize, int8 (float layers bf16) on OpenVINO, static"."""
    floats = "" if one.float_precision == one.precision else f" (float layers {one.float_precision})"
    return f"{one.variant}, {one.precision}{floats} on {engine_name(one.engine)}, {one.mode}"


def goals_sentence(judged: Sequence[Goal]) -> str:
    """Returns how many goals were met, missed or not judged."""
    met, missed = (sum(goal.met is state for goal in judged) for state in (True, False))
    if not judged:
        return "No goals were set"
    if met == len(judged):
        return "The goal was met" if met == 1 else f"All {met} goals met"
    parts = [f"{missed} of {len(judged)} goals missed" if missed else "", f"{met} met" if met else ""]
    still_open = len(judged) - met - missed
    open_words = f"{still_open} could not be judged" if met or missed else "No goal could be judged"
    return ", ".join(part for part in [*parts, open_words if still_open else ""] if part)


def place(at: str | None) -> str | None:
    """Returns where a goal was judged, with official engine names and multiplication signs."""
    words = [engine_name(word) if word in (*ENGINES, *SERVERS) else word for word in re.split(r"(, | )", at)] if at else []
    return "".join(TIMES if word == "x" else word for word in words) or None


def trust_in(low: float | None, high: float | None, busy: bool) -> str:
    """Returns the note after a speed-up: that the machine was busy, or else its 95 % interval; empty if neither is known."""
    if busy:
        return "machine busy: unreliable"
    return "" if low is None or high is None else f"95 % {ratio(low)} to {ratio(high)}"
