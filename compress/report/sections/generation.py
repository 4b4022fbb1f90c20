"""The section on engines that answer prompts: their answers compared with the baseline, their speed, and how it scales with streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compress.report import phrases
from compress.report.charts import scatter
from compress.report.charts.lines import Series, line_chart
from compress.report.model.answers import Answer, CacheCost, Speculation
from compress.report.model.contents import Contents
from compress.report.model.variant import Variant
from compress.report.phrases import NOT_MEASURED, engine_name
from compress.report.view import View
from foundation.artifacts.figures import Percentiles, Quality, Tokens
from foundation.artifacts.timed import ProposedSpeed, Speed
from foundation.artifacts.triton import TritonModel


def generation(report: Contents) -> View | None:
    """Returns the tables and charts of the section; None where no engine answers prompts."""
    engines = [(variant, engine) for variant in report.variants for engine in variant.answers]
    if not engines:
        return None
    lengths = sorted({row.prompt_tokens for _, engine in engines for row in engine.speeds})
    metric = report.metric.name
    return {
        "agreement": [_agreement(variant, engine) for variant, engine in engines],
        "has_quality": any(engine.quality for _, engine in engines),
        "caches": [_cache(_name(variant, engine), engine, engine.cache_cost, metric) for variant, engine in engines if engine.cache_cost],
        "loads": [_load(engines, length) for length in lengths],
        "proposals": [_proposals(_name(variant, engine), engine.speculation) for variant, engine in engines if engine.speculation],
        "bandwidth": _rate(report.bandwidth_bytes_per_s),
        "served": [_served(model, model.tokens) for model in report.triton.models if model.tokens],
    }


def _served(model: TritonModel, tokens: Tokens) -> View:
    """Returns the answers of one model in Triton: how many equal the engine's, and how fast both come."""
    return {
        "model": model.model,
        "identical": f"{tokens.identical} of {tokens.prompts} answers of {tokens.tokens} tokens equal the engine's",
        "rows": [
            {
                "concurrency": row.concurrency,
                "first": _times(row.first_token_ms),
                "token": _times(row.token_ms),
                "rate": f"{row.tokens_per_s:.1f}",
                "alone": "" if row.engine_tokens_per_s is None else f"{row.engine_tokens_per_s:.1f}",
                "share": "" if row.engine_share is None else f"{row.engine_share:.2f}",
            }
            for row in model.latency
        ],
    }


def _proposals(name: str, figures: Speculation) -> View:
    """Returns the effect of proposed tokens in one engine: how many were accepted, and the speed with and without them."""
    return {
        "name": name,
        "what": f"{figures.draft or 'the text'} proposes {figures.tokens} tokens",
        "accepted": _accepted(figures),
        "step": f"{figures.tokens_per_step:.2f}",
        "same": f"{figures.compared.identical} of {figures.compared.prompts}",
        "rows": [
            {
                "streams": row.streams,
                "accepted": _accepted(row),
                "step": f"{row.tokens_per_step:.2f}",
                "alone": f"{row.tokens_per_s_alone:.1f}",
                "rate": f"{row.tokens_per_s:.1f}",
                "gain": phrases.ratio(row.tokens_per_s / row.tokens_per_s_alone),
            }
            for row in sorted(figures.speeds, key=lambda row: row.streams)
        ],
    }


def _accepted(figures: Speculation | ProposedSpeed) -> str:
    share = phrases.share(figures.accepted / figures.proposed) if figures.proposed else "none proposed"
    return f"{figures.accepted} of {figures.proposed} ({share})"


def _name(variant: Variant, engine: Answer) -> str:
    rest = "" if engine.float_precision == engine.precision else f", rest {engine.float_precision}"
    return f"{variant.id} {engine.precision}{rest}"


def _agreement(variant: Variant, engine: Answer) -> View:
    baseline, own = engine.agreement.baseline or Tokens(), engine.agreement.torch or Tokens()
    return {
        "name": _name(variant, engine),
        "engine": f"{engine_name(engine.engine)} {engine.mode}, cache {engine.cache_precision}",
        "equal": phrases.share(baseline.equal_share),
        "identical": f"{baseline.identical} of {baseline.prompts}" + " questions" * bool(engine.questions),
        "first": "none" if baseline.first_other is None else f"{baseline.first_other:g}",
        "own": phrases.share(own.equal_share),
        "quality": _quality(engine.quality) if engine.quality else None,
    }


def _cache(name: str, engine: Answer, cost: CacheCost, metric: str) -> View:
    """Returns the cost of a low-precision cache in one engine: its metric and tokens next to those with a float cache."""
    change, tokens = cost.change, cost.tokens
    return {
        "name": name,
        "what": f"cache {engine.cache_precision} next to {engine.float_precision}",
        "before": phrases.figure(cost.metrics.get(metric), metric),
        "after": phrases.figure(engine.metrics.get(metric), metric),
        "change": phrases.change(change.difference, metric),
        "spread": phrases.change_interval(change.low, change.high, metric),
        "equal": phrases.share(tokens.equal_share),
        "identical": f"{tokens.identical} of {tokens.prompts}",
    }


def _quality(quality: Quality) -> View:
    """Returns BLEU and chrF of an engine, and the change of BLEU with its interval."""
    change = phrases.signed(quality.bleu - quality.bleu_before)
    low, high = quality.bleu_change or (None, None)
    spread = "no interval" if low is None or high is None else f"{phrases.signed(low)} to {phrases.signed(high)}"
    return {
        "bleu": f"{quality.bleu:.2f}",
        "chrf": f"{quality.chrf:.2f}",
        "change": f"{change} ({spread})",
        "n": quality.n,
    }


def _load(engines: Sequence[tuple[Variant, Answer]], length: int) -> View:
    """Returns the rows and charts of one length of the prompts."""
    rows, points, series = [], [], []
    for variant, engine in engines:
        speeds = sorted((row for row in engine.speeds if row.prompt_tokens == length), key=lambda row: row.streams)
        if not speeds:
            continue
        name = _name(variant, engine)
        rows += [_row(name if number == 0 else "", row) for number, row in enumerate(speeds)]
        value, token_ms = (engine.agreement.baseline or Tokens()).equal_share, speeds[0].token_ms.p50
        if value is not None and token_ms:
            title = f"{name}: {phrases.share(value)} of the baseline's tokens, {token_ms:.2f} ms per token"
            points.append(scatter.Point(token_ms, value, None, None, name, title, engine.engine, "other"))
        series.append(Series(name, name, [(float(row.streams), float(row.tokens_per_s)) for row in speeds]))

    def plot(width: int, height: int, all_labels: bool) -> Any:
        return scatter.scatter(points, width, height, lambda value: f"{100 * value:.4g}%", all_labels=all_labels)

    return {
        "tokens": length,
        "rows": rows,
        "wide": plot(1040, 380, True),
        "narrow": plot(360, 320, True),
        "throughput": line_chart("tokens per second", "streams", series),
    }


def _row(name: str, row: Speed) -> View:
    return {
        "name": name,
        "streams": row.streams,
        "first": _times(row.first_token_ms),
        "token": _times(row.token_ms),
        "rate": f"{row.tokens_per_s:.1f}",
        "share": phrases.share(row.bandwidth_share) if row.bandwidth_share is not None else "",
        "weights": phrases.size(row.weight_bytes),
        "cache": phrases.size(row.cache_bytes_per_token),
        "memory": phrases.size(row.peak_memory_bytes),
    }


def _times(percentiles: Percentiles) -> list[str]:
    return ["" if time is None else f"{time:.2f}" for time in (percentiles.p50, percentiles.p90, percentiles.p99)]


def _rate(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value / 1e9:.1f} GB/s"
