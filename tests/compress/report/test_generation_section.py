"""The section on answers in the report, from figures made up by hand."""

from __future__ import annotations

from typing import Any

from compress.report.sections.generation import generation
from tests.plain_reports import contents


def speed(streams: int, tokens_per_s: float, **changes: Any) -> dict[str, Any]:
    times = {"p50": 2.0, "p90": 3.0, "p99": None}
    row = {"prompt_tokens": 32, "streams": streams, "first_token_ms": times, "token_ms": times, "tokens_per_s": tokens_per_s}
    sizes = {"weight_bytes": 10**6, "cache_bytes_per_token": 2048, "peak_memory_bytes": 10**8, "bandwidth_share": 0.5}
    return {**row, **sizes, **changes}


def report(*speeds: dict[str, Any]) -> dict[str, Any]:
    compared = {"equal_share": 0.9, "identical": 3, "prompts": 4, "first_other": 7.0}
    engine = {
        "engine": "openvino_genai",
        "mode": "paged",
        "precision": "int8",
        "float_precision": "bf16",
        "cache_precision": "int8",
        "metrics": {"perplexity": 30.9},
        "agreement": {"baseline": compared, "torch": {**compared, "equal_share": 1.0, "first_other": None}},
        "speeds": list(speeds),
    }
    times = {"p50": 1.0, "p90": 2.0, "p99": None}
    row = {"concurrency": 4, "first_token_ms": times, "token_ms": times, "tokens_per_s": 250.0}
    beside = {**row, "concurrency": 8, "engine_tokens_per_s": 400.0, "engine_share": 0.625}
    models = [
        {"model": "quantize-int8", "tokens": {"identical": 7, "prompts": 8, "tokens": 64}, "latency": [row, beside]},
        {"model": "other"},
    ]
    variants = [{"id": "baseline"}, {"id": "quantize", "answers": [engine]}]
    return {"variants": variants, "metric": {"name": "perplexity"}, "bandwidth_bytes_per_s": 4e10, "triton": {"models": models}}


def test_a_run_without_answers_has_no_section() -> None:
    assert generation(contents({"variants": [{"id": "baseline", "answers": []}, {"id": "quantize"}]})) is None


def test_agreement_and_speeds_stand_in_tables_and_charts() -> None:
    found = generation(contents(report(speed(4, 300.0, bandwidth_share=None), speed(1, 100.0), speed(1, 90.0, prompt_tokens=512))))
    assert found is not None
    [row] = found["agreement"]
    assert (row["name"], row["engine"]) == ("quantize int8, rest bf16", "OpenVINO GenAI paged, cache int8")
    assert (row["equal"], row["identical"], row["first"], row["own"]) == ("90.0\xa0%", "3 of 4", "7", "100\xa0%")
    assert found["bandwidth"] == "40.0 GB/s"
    short, long = found["loads"]
    assert (short["tokens"], long["tokens"]) == (32, 512)
    first, second = short["rows"]
    assert (first["name"], first["streams"], first["rate"], first["share"]) == ("quantize int8, rest bf16", 1, "100.0", "50.0\xa0%")
    assert (second["name"], second["streams"], second["share"]) == ("", 4, "")
    assert first["token"] == ["2.00", "3.00", ""]
    assert [point.point.y for point in short["wide"].marks] == [0.9]
    [line] = short["throughput"].lines
    assert len(line.points) == 2
    [served] = found["served"]
    assert served["identical"].startswith("7 of 8 answers of 64 tokens")
    shown = {"first": ["1.00", "2.00", ""], "token": ["1.00", "2.00", ""], "rate": "250.0"}
    assert served["rows"] == [
        {"concurrency": 4, **shown, "alone": "", "share": ""},  # a report from before the engine was timed beside
        {"concurrency": 8, **shown, "alone": "400.0", "share": "0.62"},
    ]


def test_what_was_not_timed_stands_in_the_table_of_agreement_alone() -> None:
    found = generation(contents(report()))
    assert found is not None
    assert found["loads"] == []


def test_what_a_cache_in_less_than_float_cost_stands_in_a_table_of_its_own() -> None:
    given = report()
    assert generation(contents(given))["caches"] == []  # type: ignore[index]
    change = {"difference": 0.03, "low": 0.01, "high": 0.05}
    cost = {"metrics": {"perplexity": 30.0}, "change": change, "tokens": {"equal_share": 0.75, "identical": 1, "prompts": 4}}
    given["variants"][1]["answers"][0]["cache_cost"] = cost
    [row] = generation(contents(given))["caches"]  # type: ignore[index]
    assert (row["name"], row["what"]) == ("quantize int8, rest bf16", "cache int8 next to bf16")
    assert (row["before"], row["after"], row["change"], row["spread"]) == ("30.00", "30.90", "+3.00\xa0%", "+1.00 to +5.00\xa0%")
    assert (row["equal"], row["identical"]) == ("75.0\xa0%", "1 of 4")


def test_what_proposed_tokens_did_stands_in_a_table_of_its_own() -> None:
    given = report(speed(1, 100.0))
    assert generation(contents(given))["proposals"] == []  # type: ignore[index]
    row = {"tokens_per_s": 150.0, "tokens_per_s_alone": 100.0, "tokens_per_step": 2.5, "proposed": 8, "accepted": 6}
    told = {
        "draft": "draft-fp32",
        "tokens": 4,
        "compared": {"identical": 3, "prompts": 4},
        "tokens_per_step": 2.345,
        "proposed": 0,
        "accepted": 0,
    }
    given["variants"][1]["answers"][0]["speculation"] = {**told, "speeds": [{**row, "streams": 4}, {**row, "streams": 1}]}
    [found] = generation(contents(given))["proposals"]  # type: ignore[index]
    assert (found["name"], found["what"]) == ("quantize int8, rest bf16", "draft-fp32 proposes 4 tokens")
    assert (found["accepted"], found["step"], found["same"]) == ("0 of 0 (none proposed)", "2.35", "3 of 4")
    assert [one["streams"] for one in found["rows"]] == [1, 4]
    first = found["rows"][0]
    assert (first["accepted"], first["step"]) == ("6 of 8 (75.0\xa0%)", "2.50")
    assert (first["alone"], first["rate"], first["gain"]) == ("100.0", "150.0", "1.50\xd7")
    given["variants"][1]["answers"][0]["speculation"]["draft"] = None
    assert generation(contents(given))["proposals"][0]["what"] == "the text proposes 4 tokens"  # type: ignore[index]
