"""Flips of tokens: each of them once, told as text that the tokenizer gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.artifacts.artifact import Artifact
from compress.artifacts.run_folder import Run
from compress.core.next_token import NO_CHOICE
from compress.report import hops
from compress.report.hops import Hop, TokenFlips, write_flips
from tests.compress import tiny_gpt


def answers(changes: dict[tuple[int, int], int]) -> np.ndarray:
    """Returns what a model answers that holds token 5 likeliest everywhere, but other tokens at some places."""
    split = tiny_gpt.data().evaluation
    found = np.zeros((len(split), tiny_gpt.LENGTH - 1, 2), np.float32)
    found[..., 1] = np.where(split.labels >= 0, 5, NO_CHOICE)
    for place, token in changes.items():
        found[(*place, 1)] = token
    return found


def test_changed_tokens_are_told_with_what_stands_before_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_gpt.data()
    baseline, quantized, engine = answers({}), answers({(0, 0): 7, (2, 4): 9}), answers({(0, 0): 7})
    rows = [("baseline", "torch", baseline), ("quantize", "torch", quantized), ("quantize", "openvino", engine)]
    told = [Hop(variant, hop, "", "", logits, data.evaluation.labels, {}) for variant, hop, logits in rows]
    monkeypatch.setattr(hops, "hops", lambda run: iter(told))
    checkpoint = Artifact(tiny_gpt.checkpoint(), {})
    recipe: Any = {"model": {"task": "text-generation"}}
    run = Run(tmp_path, recipe, (), {}, {"baseline": checkpoint, "evaluate-baseline": checkpoint})
    assert write_flips(run, data) == 3
    lines = [json.loads(line) for line in (tmp_path / "flips.jsonl").read_text().splitlines()]
    decode = TokenFlips(tiny_gpt.checkpoint(), data).tokenizer.decode
    block = [int(token) for token in data.evaluation.rows[2]]  # type: ignore[union-attr]
    places = [(line["row"], line["position"], line["variant"], line["from"], line["to"]) for line in lines]
    assert places == [
        (0, 1, "quantize", "baseline torch", "torch"),
        (2, 5, "quantize", "baseline torch", "torch"),
        (2, 5, "quantize", "torch", "openvino"),
    ]
    assert (lines[1]["before"], lines[1]["after"], lines[1]["label"]) == (decode([5]), decode([9]), decode([block[5]]))
    assert lines[1]["input"] == decode(block[:5])
    assert (lines[2]["before"], lines[2]["after"]) == (decode([9]), decode([5]))
