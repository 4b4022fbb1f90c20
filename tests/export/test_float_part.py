"""What decides whether the float part of an int8 engine is bf16."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.exporter import Exporter
from export.float_part import judge, recommended_first
from foundation.artifacts.exported import Engine
from foundation.measure.closeness import ADDED_FLOOR, ADDED_SHARE


def kl(reference: list[list[float]], answers: list[list[float]]) -> float:
    """Mean over rows of sum_c p_c log(p_c / q_c), written out."""
    total = 0.0
    for before, after in zip(reference, answers, strict=True):
        p = [math.exp(value) / sum(math.exp(other) for other in before) for value in before]
        q = [math.exp(value) / sum(math.exp(other) for other in after) for value in after]
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return total / len(reference)


@given(st.integers(1, 5), st.integers(2, 4), st.integers(0, 2**31), st.floats(0.0, 0.3))
def test_bf16_wins_where_it_adds_no_more_than_a_quarter(rows: int, classes: int, seed: int, error: float) -> None:
    random = np.random.default_rng(seed)
    reference = random.normal(size=(rows, classes)).astype(np.float32)
    fp32 = (reference + 0.1 * random.normal(size=reference.shape)).astype(np.float32)
    bf16 = (fp32 + error * random.normal(size=reference.shape)).astype(np.float32)
    found = judge("text-classification", reference, fp32, bf16)
    before, after = kl(reference.tolist(), fp32.tolist()), kl(reference.tolist(), bf16.tolist())
    assert (found.fp32, found.half, found.rows) == (pytest.approx(before, abs=1e-9), pytest.approx(after, abs=1e-9), rows)
    assert found.bound == pytest.approx(max(ADDED_SHARE * before, ADDED_FLOOR), abs=1e-9)
    assert found.precision == ("bf16" if found.half - found.fp32 <= found.bound else "fp32")


def test_for_values_the_floor_is_a_share_of_their_variance() -> None:
    reference = np.float32([[0.0], [2.0], [4.0], [6.0]])
    near, far = reference + np.float32(0.02), reference + np.float32(0.03)
    found = judge("text-regression", reference, reference, near)
    assert (found.precision, found.bound) == ("bf16", pytest.approx(ADDED_FLOOR * 5.0))
    assert judge("text-regression", reference, reference, far).precision == "fp32"


def test_generation_compares_the_nll_of_tokens() -> None:
    reference = np.zeros((1, 3, 2), np.float32)
    reference[..., 0] = [1.0, 2.0, 3.0]
    moved = reference.copy()
    moved[0, 1, 0] += 0.3
    assert judge("text-generation", reference, reference, moved).half == pytest.approx(0.09 / 3, rel=1e-3)


def test_rows_that_the_gate_has_asked_are_not_asked_again() -> None:
    rows = [f"row {number}" for number in range(5)]
    asked: list[str] = []

    def predicted(process: object, entry: object, others: list[str], batch: int) -> Any:
        asked.extend(others)
        return np.array([[float(row[-1])] for row in others], np.float32)

    gate = SimpleNamespace(split=SimpleNamespace(rows=[rows[3], rows[0], rows[4]]), looks=[2, 3])
    selection = SimpleNamespace(rows=rows, labels=SimpleNamespace(evenly=lambda count: range(5)))
    context = SimpleNamespace(data=SimpleNamespace(selection=selection), task="text-classification")
    exporter: Any = SimpleNamespace(gate=gate, context=context, _predicted=predicted)
    process: Any = None
    found = Exporter._trial_answers(exporter, process, Engine(engine="openvino"), 2, np.float32([[3.0], [0.0]]))  # of two rows of the gate
    assert asked == ["row 1", "row 2", "row 4"]
    assert found.tolist() == [[0.0], [1.0], [2.0], [3.0], [4.0]]
    asked.clear()
    context.task = "text-generation"  # blocks of over a hundred predictions each: those of the gate's first look are enough
    found = Exporter._trial_answers(exporter, process, Engine(engine="openvino_genai"), 2, np.float32([[3.0], [0.0]]))
    assert (asked, found.tolist()) == ([], [[3.0], [0.0]])


def test_only_engines_with_a_preference_move() -> None:
    entries = [
        Engine(engine="openvino", mode="static", float_precision="fp32"),
        Engine(engine="openvino", mode="static", float_precision="bf16"),
        Engine(engine="onnxruntime", mode="dynamic", float_precision="fp32"),
    ]
    moved = recommended_first(entries, {"openvino": "bf16"})
    assert [entry.float_precision for entry in moved if entry.engine == "openvino"] == ["bf16", "fp32"]
    assert recommended_first(entries, {"openvino": "fp32"})[0] is entries[0]
    assert recommended_first(entries, {"onnxruntime": "bf16"})[0] is entries[0]
    assert recommended_first(entries, {}) == entries


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_the_half_that_was_judged_is_named(half: Any) -> None:
    reference = np.zeros((2, 3), np.float32)
    assert judge("text-classification", reference, reference, reference, half).precision == half
    assert judge("text-classification", reference, reference, reference + np.float32([9, 0, 0]), half).precision == "fp32"
