"""latency.json and generation.json: what is written is read again, and what is no such document is named."""

import json
from pathlib import Path

import pytest

from foundation.artifacts.artifact import DamagedArtifact
from foundation.artifacts.timed import (
    Generated,
    VariantProposedSpeed,
    VariantSpeed,
    VariantTiming,
    read_generated,
    read_latency,
    write_generated,
    write_latency,
)

NAMES = {"precision": "int8", "float_precision": "bf16", "engine": "openvino", "mode": "static"}


def test_latencies_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [VariantTiming(variant="quantize", **NAMES, batch=8, sequence=None, p50_ms=2, p99_ms=None, turns_ms=[2.0, None])]
    write_latency(tmp_path, rows)
    (plain,) = json.loads((tmp_path / "latency.json").read_text())
    assert next(iter(plain)) == "variant"
    assert (plain["sequence"], plain["p50_ms"], plain["p99_ms"], plain["turns_ms"]) == (None, 2, None, [2.0, None])
    assert "p90_ms" not in plain
    (read,) = read_latency(tmp_path)
    assert read == rows[0]
    assert (read.key, read.shape) == (("quantize", "int8", "bf16", "openvino", "static"), (8, None))
    assert (read.median_ms, read.percentile_ms(90), read.percentile_ms(99)) == (2.0, None, None)


@pytest.mark.parametrize("text", ["", "3", '{"a": 1}', '[{"batch": "many"}]'])
def test_what_are_no_latencies_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(DamagedArtifact, match=r"latency\.json"):
        read_latency(tmp_path)
    (tmp_path / "latency.json").write_text(text)
    with pytest.raises(DamagedArtifact, match=r"latency\.json"):
        read_latency(tmp_path)


def test_speeds_are_listed_in_a_report_without_what_their_engine_is(tmp_path: Path) -> None:
    assert read_generated(tmp_path) == Generated()
    named = {"variant": "quantize", "cache_precision": "int8", **NAMES}
    row = VariantSpeed(**named, prompt_tokens=32, tokens_per_s=9.5, token_ms={"p50": 1.5, "p99": None})
    helped = VariantProposedSpeed(**named, device="cpu", streams=4, accepted=3)
    write_generated(tmp_path, Generated(bandwidth_bytes_per_s=10**9, rows=[row], proposals=[helped]))
    found = read_generated(tmp_path)
    assert (found.bandwidth_bytes_per_s, found.rows, found.proposals) == (10**9, (row,), (helped,))
    assert found.rows[0].key == ("quantize", "int8", "bf16", "openvino", "static")
    assert row.speed.written() == {"prompt_tokens": 32, "token_ms": {"p50": 1.5, "p99": None}, "tokens_per_s": 9.5}
    assert helped.speed.written() == {"streams": 4, "accepted": 3}
