"""The latency table on made-up engines: exact where times add up, monotone whatever was measured, straight between the points."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prune.latency.table import DEPTHS, POINTS, Curve, LatencyTable, grid, points


def block(heads: int, ffn: int, of_heads: float = 1.0, of_ffn: float = 1.0) -> float:
    """0.2 ms, steps of attention, a line of neurons."""
    return 0.2 + of_heads * 0.05 * (heads**0.5 - 1) + of_ffn * 0.001 * (ffn - 32)


@pytest.mark.parametrize("last", [(1.0, 1.0), (0.5, 0.0), (0.0, 0.3), (0.0, 0.0)])
def test_a_table_of_times_that_add_up_is_exact_at_its_points(last: tuple[float, float]) -> None:
    """Of an engine with 0.7 ms of embeddings and head whose last block computes all of it, or less."""
    heads, ffn = grid(12, 1), grid(1536, 32)
    engine = {point: 0.7 + (point[0] - 1) * block(*point[1:3]) + block(*point[3:], *last) for point in points(heads, ffn)}
    table = LatencyTable.of(engine, heads, ffn)
    assert table.rest_ms == pytest.approx(0.7)
    assert table.last == pytest.approx(last)
    for count in heads:
        for neurons in ffn:
            assert table.block(count, neurons) == pytest.approx(block(count, neurons))
            assert table.block(count, neurons, last=True) == pytest.approx(block(count, neurons, *last))
    middle = (heads[1] + heads[2]) / 2
    assert table.heads.at(middle) == pytest.approx((table.heads.at(heads[1]) + table.heads.at(heads[2])) / 2)
    assert LatencyTable.read(table.as_json()) == table


@given(
    st.integers(1, 16),
    st.integers(1, 300),
    st.sampled_from([1, 8, 32]),
    st.lists(st.floats(0.01, 50), min_size=2 * POINTS + 4, max_size=2 * POINTS + 4),
)
def test_no_table_says_that_less_takes_longer_or_less_than_no_time(most: int, neurons: int, step: int, noise: list[float]) -> None:
    heads, ffn = grid(most, 1), grid(neurons, step)
    wanted = points(heads, ffn)
    table = LatencyTable.of(dict(zip(wanted, noise, strict=False)), heads, ffn)
    assert table.rest_ms >= -1e-9
    assert table.block_ms >= 0
    for curve in (table.heads, table.ffn):
        assert curve.ms[0] == 0
        assert all(later >= earlier for earlier, later in zip(curve.ms, curve.ms[1:], strict=False))
        between = [curve.at(count) for count in np.linspace(0, curve.counts[-1] + 3, 40)]
        assert between == sorted(between)


@given(st.integers(1, 5000), st.sampled_from([1, 4, 32, 64]))
def test_grids_hold_what_may_be_kept(most: int, step: int) -> None:
    found = grid(most, step)
    assert found[-1] == most
    assert 1 <= len(found) <= POINTS
    assert list(found) == sorted(set(found))
    assert found[0] == min(step, most)
    assert all(count % step == 0 for count in found[:-1])
    lasts = 2 if len(found) > 1 else 0
    assert len(points(found, found)) == len(set(points(found, found))) == 2 * len(found) + lasts
    assert {point[0] for point in points(found, found)} == set(DEPTHS)


@given(st.lists(st.floats(0, 9), min_size=1, max_size=6), st.lists(st.floats(0, 40), min_size=1, max_size=4))
def test_expected_counts_cost_what_the_curve_says_and_have_its_slope(times: list[float], counts: list[float]) -> None:
    curve = Curve.of(tuple(3 + 5 * number for number in range(len(times))), times)
    given_counts = torch.tensor(counts, requires_grad=True)
    found = curve.expected(given_counts)
    np.testing.assert_allclose(found.detach().numpy(), [curve.at(count) for count in counts], atol=1e-5)
    found.sum().backward()
    assert given_counts.grad is not None
    for count, slope in zip(counts, given_counts.grad.tolist(), strict=True):
        beside = [abs(count - known) < 0.02 for known in curve.counts]
        if not any(beside):
            assert slope == pytest.approx((curve.at(count + 0.01) - curve.at(count - 0.01)) / 0.02, abs=1e-3)


def test_the_curve_of_least_squares_is_that_of_pooling_neighbours() -> None:
    curve = Curve.of((1, 2, 3, 4), (1.0, 3.0, 2.0, 5.0))
    assert curve.ms == pytest.approx((0.0, 1.5, 1.5, 4.0))
    assert Curve.of((1, 2, 3), (5.0, 4.0, 3.0)).ms == pytest.approx((0.0, 0.0, 0.0))
