"""Engines that answer prompts in the report: what they answer compared with the baseline, how fast, and how that grows with streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compress.report import phrases
from compress.report.charts import scatter
from compress.report.charts.lines import Series, line_chart
from compress.report.phrases import NOT_MEASURED, engine_name
from compress.report.view import Report, View
from foundation.core.engines import REFERENCE


def generation(report: Report) -> View | None:
    """Returns the tables and charts of the section; None where no engine answers prompts."""
    engines = [(variant, engine) for variant in report["variants"] for engine in variant.get("answers") or []]
    if not engines:
        return None
    lengths = sorted({row["prompt_tokens"] for _, engine in engines for row in engine["speeds"]})
    return {
        "agreement": [_agreement(variant, engine) for variant, engine in engines],
        "has_quality": any(engine.get("quality") for _, engine in engines),
        "caches": [_cache(variant, engine, report["metric"]["name"]) for variant, engine in engines if engine.get("cache_cost")],
        "loads": [_load(engines, length) for length in lengths],
        "proposals": [_proposals(variant, engine) for variant, engine in engines if engine.get("speculation")],
        "bandwidth": _rate(report.get("bandwidth_bytes_per_s")),
        "served": [_served(model) for model in report["triton"].get("models") or () if model.get("tokens")],
    }


def _served(model: Report) -> View:
    """Returns the answers of one model in Triton: how many equal the engine's, and how fast both come."""
    tokens = model["tokens"]
    return {
        "model": model.get("model"),
        "identical": f"{tokens['identical']} of {tokens['prompts']} answers of {tokens['tokens']} tokens equal the engine's",
        "rows": [
            {
                "concurrency": row["concurrency"],
                "first": _times(row["first_token_ms"]),
                "token": _times(row["token_ms"]),
                "rate": f"{row['tokens_per_s']:.1f}",
                "alone": "" if row.get("engine_tokens_per_s") is None else f"{row['engine_tokens_per_s']:.1f}",
                "share": "" if row.get("engine_share") is None else f"{row['engine_share']:.2f}",
            }
            for row in model.get("latency") or ()
        ],
    }


def _proposals(variant: Report, engine: Report) -> View:
    """Returns what proposed tokens did to one engine: how many were accepted, and the speed with and without them."""
    told = engine["speculation"]
    compared = told["compared"]
    return {
        "name": _name(variant, engine),
        "what": f"{told['draft'] or 'the text'} proposes {told['tokens']} tokens",
        "accepted": _accepted(told),
        "step": f"{told['tokens_per_step']:.2f}",
        "same": f"{compared['identical']} of {compared['prompts']}",
        "rows": [
            {
                "streams": row["streams"],
                "accepted": _accepted(row),
                "step": f"{row['tokens_per_step']:.2f}",
                "alone": f"{row['tokens_per_s_alone']:.1f}",
                "rate": f"{row['tokens_per_s']:.1f}",
                "gain": phrases.ratio(row["tokens_per_s"] / row["tokens_per_s_alone"]),
            }
            for row in sorted(told["speeds"], key=lambda row: row["streams"])
        ],
    }


def _accepted(told: Report) -> str:
    share = phrases.share(told["accepted"] / told["proposed"]) if told["proposed"] else "none proposed"
    return f"{told['accepted']} of {told['proposed']} ({share})"


def _name(variant: Report, engine: Report) -> str:
    rest = "" if engine["float_precision"] == engine["precision"] else f", rest {engine['float_precision']}"
    return f"{variant.get('id')} {engine['precision']}{rest}"


def _agreement(variant: Report, engine: Report) -> View:
    baseline, own = (engine["agreement"].get(key) or {} for key in ("baseline", REFERENCE))
    first = baseline.get("first_other")
    return {
        "name": _name(variant, engine),
        "engine": f"{engine_name(engine['engine'])} {engine['mode']}, cache {engine['cache_precision']}",
        "equal": phrases.share(baseline.get("equal_share")),
        "identical": f"{baseline.get('identical')} of {baseline.get('prompts')}" + " questions" * bool(engine.get("questions")),
        "first": "none" if first is None else f"{first:g}",
        "own": phrases.share(own.get("equal_share")),
        "quality": _quality(engine["quality"]) if engine.get("quality") else None,
    }


def _cache(variant: Report, engine: Report, metric: str) -> View:
    """Returns what a cache in less than float cost one engine: its metric and its tokens beside those with a float cache."""
    cost = engine["cache_cost"]
    change, tokens = cost["change"], cost["tokens"]
    return {
        "name": _name(variant, engine),
        "what": f"cache {engine['cache_precision']} beside {engine['float_precision']}",
        "before": phrases.figure(cost["metrics"].get(metric), metric),
        "after": phrases.figure(engine["metrics"].get(metric), metric),
        "change": phrases.change(change["difference"], metric),
        "spread": phrases.change_interval(change["low"], change["high"], metric),
        "equal": phrases.share(tokens["equal_share"]),
        "identical": f"{tokens['identical']} of {tokens['prompts']}",
    }


def _quality(found: Report) -> View:
    """Returns BLEU and chrF of an engine, and the change of BLEU with its interval."""
    change = phrases.signed(found["bleu"] - found["bleu_before"])
    low, high = found["bleu_change"] or (None, None)
    spread = "no interval" if low is None or high is None else f"{phrases.signed(low)} to {phrases.signed(high)}"
    return {
        "bleu": f"{found['bleu']:.2f}",
        "chrf": f"{found['chrf']:.2f}",
        "change": f"{change} ({spread})",
        "n": found["n"],
    }


def _load(engines: Sequence[tuple[Report, Report]], length: int) -> View:
    """Returns the rows and charts of one length of the prompts."""
    rows, points, series = [], [], []
    for variant, engine in engines:
        speeds = sorted((row for row in engine["speeds"] if row["prompt_tokens"] == length), key=lambda row: row["streams"])
        if not speeds:
            continue
        name = _name(variant, engine)
        rows += [_row(name if number == 0 else "", row) for number, row in enumerate(speeds)]
        value, token_ms = (engine["agreement"].get("baseline") or {}).get("equal_share"), speeds[0]["token_ms"]["p50"]
        if value is not None and token_ms:
            title = f"{name}: {phrases.share(value)} of the baseline's tokens, {token_ms:.2f} ms per token"
            points.append(scatter.Point(token_ms, value, None, None, name, title, engine["engine"], "other"))
        series.append(Series(name, name, [(float(row["streams"]), float(row["tokens_per_s"])) for row in speeds]))

    def plot(width: int, height: int, all_labels: bool) -> Any:
        return scatter.scatter(points, width, height, lambda value: f"{100 * value:.4g}%", all_labels=all_labels)

    return {
        "tokens": length,
        "rows": rows,
        "wide": plot(1040, 380, True),
        "narrow": plot(360, 320, True),
        "throughput": line_chart("tokens per second", "streams", series),
    }


def _row(name: str, row: Report) -> View:
    share = row.get("bandwidth_share")
    return {
        "name": name,
        "streams": row["streams"],
        "first": _times(row["first_token_ms"]),
        "token": _times(row["token_ms"]),
        "rate": f"{row['tokens_per_s']:.1f}",
        "share": phrases.share(share) if share is not None else "",
        "weights": phrases.size(row["weight_bytes"]),
        "cache": phrases.size(row["cache_bytes_per_token"]),
        "memory": phrases.size(row["peak_memory_bytes"]),
    }


def _times(found: Report) -> list[str]:
    return ["" if found[key] is None else f"{found[key]:.2f}" for key in ("p50", "p90", "p99")]


def _rate(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value / 1e9:.1f} GB/s"
