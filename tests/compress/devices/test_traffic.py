"""What devices send where several share each layer: formulas against the algorithms, written out with blocks."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compress.devices import traffic
from compress.devices.traffic import Part, Product
from foundation.models.checkpoint import load

Blocks = dict[tuple[int, ...], Tensor]


def blocks(whole: Tensor, rows: int, columns: int) -> Blocks:
    """A matrix in blocks."""
    return {(i, j): block for i, row in enumerate(whole.chunk(rows, 0)) for j, block in enumerate(row.chunk(columns, 1))}


def joined(parts: Blocks, side: int) -> Tensor:
    return torch.cat([torch.cat([parts[i, j] for j in range(side)], 1) for i in range(side)], 0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def summa(t: int, k: int, n: int, q: int) -> tuple[Counter[tuple[int, int]], list[tuple[Tensor, Tensor]]]:
    """A product and its gradients on q x q devices: device (i, j) has a block of X, W and dY. Counts what each receives from another."""
    x, w, dy = drawn(t, k), drawn(k, n), drawn(t, n)
    X, W, dY, received = blocks(x, q, q), blocks(w, q, q), blocks(dy, q, q), Counter[tuple[int, int]]()
    Y: Blocks = {}
    dX = {place: torch.zeros_like(block) for place, block in X.items()}
    dW = {place: torch.zeros_like(block) for place, block in W.items()}
    for i, j, at in itertools.product(range(q), repeat=3):
        received[i, j] += X[i, at].numel() * (at != j) + W[at, j].numel() * (at != i)  # forward
        Y[i, j] = Y.get((i, j), 0) + X[i, at] @ W[at, j]
        received[i, j] += W[at, j].numel() * (at != i) + X[i, at].numel() * (at != j)  # both again, backward
        received[i, at] += X[i, at].numel() * (at != j)  # a part of dX, at who has that block
        dX[i, at] += dY[i, j] @ W[at, j].T
        received[at, j] += W[at, j].numel() * (at != i)  # and of dW
        dW[at, j] += X[i, at].T @ dY[i, j]
    return received, [(joined(Y, q), x @ w), (joined(dX, q), dy @ w.T), (joined(dW, q), x.T @ dy)]


def cube(t: int, k: int, n: int, q: int) -> tuple[Counter[tuple[int, ...]], list[tuple[Tensor, Tensor]]]:
    """The same on q x q x q devices: device (i, j, l) has a q-th of X[i, l], of W[l, j] and of dY[i, j]; it makes a part of Y[i, j]."""
    x, w, dy = drawn(t, k), drawn(k, n), drawn(t, n)
    X, W, dY, received = blocks(x, q, q), blocks(w, q, q), blocks(dy, q, q), Counter[tuple[int, ...]]()
    Y: Blocks = {}
    dX = {place: torch.zeros_like(block) for place, block in X.items()}
    dW = {place: torch.zeros_like(block) for place, block in W.items()}
    for place in itertools.product(range(q), repeat=3):
        i, j, at = place
        others = (q - 1) / q
        received[place] += round(others * (X[i, at].numel() + W[at, j].numel()))  # gathered, forward
        Y[i, j] = Y.get((i, j), 0) + X[i, at] @ W[at, j]
        received[place] += round(others * dY[i, j].numel())  # parts of its piece of Y
        received[place] += round(others * (dY[i, j].numel() + X[i, at].numel() + W[at, j].numel()))  # gathered, backward
        dX[i, at] += dY[i, j] @ W[at, j].T
        dW[at, j] += X[i, at].T @ dY[i, j]
        received[place] += round(others * (X[i, at].numel() + W[at, j].numel()))  # parts of its pieces of both gradients
    return received, [(joined(Y, q), x @ w), (joined(dX, q), dy @ w.T), (joined(dW, q), x.T @ dy)]


@pytest.mark.parametrize(("t", "k", "n", "q"), [(4, 4, 4, 2), (8, 12, 4, 2), (9, 3, 12, 3), (16, 8, 24, 4)])
def test_two_dimensions_send_what_summa_sends(t: int, k: int, n: int, q: int) -> None:
    received, results = summa(t, k, n, q)
    assert all(torch.allclose(*pair) for pair in results)
    assert set(received.values()) == {round(traffic.two_d([Part(k, (Product(k, n),))], t, q))}


@pytest.mark.parametrize(("t", "k", "n", "q"), [(8, 8, 8, 2), (8, 16, 32, 2), (27, 54, 27, 3)])
def test_three_dimensions_send_what_a_cube_sends(t: int, k: int, n: int, q: int) -> None:
    received, results = cube(t, k, n, q)
    assert all(torch.allclose(*pair) for pair in results)
    assert set(received.values()) == {round(traffic.three_d([Part(k, (Product(k, n),))], t, q))}


@pytest.mark.parametrize(("t", "k", "n", "q", "d"), [(8, 4, 8, 2, 2), (24, 6, 12, 2, 3)])
def test_layers_of_meshes_share_rows_and_sum_gradients(t: int, k: int, n: int, q: int, d: int) -> None:
    received, _ = summa(t // d, k, n, q)
    gradient = k * n // q**2
    summed = 2 * (d - 1) * gradient / d  # a ring: d - 1 pieces are summed, and d - 1 are handed on
    assert traffic.two_and_a_half_d([Part(k, (Product(k, n),))], t, q, d) == pytest.approx(received[0, 0] + summed)


PARTS = [Part(8, (Product(8, 24), Product(8, 8))), Part(8, (Product(8, 32), Product(32, 8)))]
"""A block with a hidden size of 8."""


def ring_sum(numel: int, devices: int) -> float:
    """Elements that each of some devices sends to sum a tensor: one piece in each step of the ring."""
    return sum(numel / devices for _ in range(2 * (devices - 1)))


@pytest.mark.parametrize("devices", [2, 4, 6])
def test_one_dimension_sums_what_a_block_hands_on(devices: int) -> None:
    tokens = 12
    sums = [tokens * 8] * 4  # after attention and FFN, and of the gradients of what they read
    assert traffic.one_d(PARTS, tokens, devices) == pytest.approx(sum(ring_sum(numel, devices) for numel in sums))
    gathers = [tokens * 8] * 10  # a gather and a scatter in both directions, and a gather more for the gradients of weights
    expected = sum(ring_sum(numel, devices) / 2 for numel in gathers)
    assert traffic.one_d_sequence(PARTS, tokens, devices) == pytest.approx(expected)


def test_a_grid_sends_activations_of_its_rows_and_gathers_shares_of_weights() -> None:
    tokens, rows, columns, weights = 24, 3, 4, 8 * 24 + 8 * 8 + 8 * 32 + 32 * 8
    activations = 10 * sum(tokens // rows * 8 / columns for _ in range(columns - 1))
    shares = 3 * sum(weights / columns / rows for _ in range(rows - 1))  # for forward, for backward, and of the gradient
    assert traffic.grid(PARTS, tokens, rows, columns) == pytest.approx(activations + shares)


@given(st.integers(1, 10**6), st.sampled_from([4, 8, 9, 12, 16, 27, 64]))
def test_the_best_of_each_kind_is_the_least(tokens: int, devices: int) -> None:
    every: dict[str, list[float]] = {}
    for kind, _, sends in traffic.shapes(devices):
        every.setdefault(kind, []).append(sends(PARTS, tokens))
    found = traffic.best(PARTS, tokens, devices)
    assert {kind: elements for kind, (_, elements) in found.items()} == {kind: min(values) for kind, values in every.items()}


def test_shapes_have_as_many_places_as_devices() -> None:
    names = {devices: [name for _, name, _ in traffic.shapes(devices)] for devices in (2, 4, 8, 12, 64)}
    assert names[2] == ["1-D of 2", "1-D of 2, sequence"]
    assert names[4][2:] == ["grid of 2 x 2", "2-D of 2 x 2"]
    assert names[8][2:] == ["grid of 2 x 4", "grid of 4 x 2", "2.5-D of 2 x 2 x 2", "3-D of 2 x 2 x 2"]
    assert "2.5-D of 2 x 2 x 3" not in names[12]  # deeper than it is wide
    assert {"2-D of 8 x 8", "2.5-D of 4 x 4 x 4", "3-D of 4 x 4 x 4"} <= {*names[64]}


@pytest.mark.parametrize("tokens", [1, 16, 64, 4096, 10**6])
def test_a_shape_pays_where_it_sends_less_than_one_dimension(tokens: int) -> None:
    found = traffic.pays_from(PARTS, tokens)
    for kind, number in found.items():
        earlier = [devices for devices in (4, 8, 9, 16, 25, 27, 32, 64) if number is None or devices < number]
        for devices in earlier:
            shaped = traffic.best(PARTS, tokens, devices)
            assert kind not in shaped or shaped[kind][1] >= shaped["1-D"][1]
        if number is not None:
            shaped = traffic.best(PARTS, tokens, number)
            assert shaped[kind][1] < shaped["1-D"][1]
    assert tokens < 10**6 or all(found.values())  # with many tokens weights are nothing


def test_a_block_is_read_from_its_model(tiny_bert: Path) -> None:
    model: Any = load(tiny_bert)
    found, hidden, neurons = traffic.parts_of(model, "model"), model.config.hidden_size, model.config.intermediate_size
    attention = Part(hidden, (Product(hidden, 3 * hidden), Product(hidden, hidden)))
    ffn = Part(hidden, (Product(hidden, neurons), Product(neurons, hidden)))
    assert found == [attention, ffn] * model.config.num_hidden_layers


def test_lines_name_every_shape_and_from_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = traffic.describe(PARTS, 4096, 4, 4)
    assert "1-D of 4 786.4 kB" in first
    assert "grid of 2 x 2" in first
    assert "4096 tokens" in first
    pays = traffic.pays_from(PARTS, 4096)
    assert f"grid from {pays['grid']} devices on" in second
    monkeypatch.setattr(traffic, "MOST_DEVICES", 16)
    assert traffic.describe(PARTS, 1, 4, 4)[1].count("not up to 16") == 4


def test_scatters_that_gloo_sums_are_counted_twice() -> None:
    gathered, scattered = 12 * 24 * 8 / 4, 8 * 24 * 8 / 4
    assert traffic.one_d_sequence(PARTS, 24, 2) == pytest.approx(gathered + scattered)
    assert traffic.one_d_sequence(PARTS, 24, 2, 2.0) == pytest.approx(gathered + 2 * scattered)
    weights = 8 * 24 + 8 * 8 + 8 * 32 + 32 * 8
    more = traffic.grid(PARTS, 24, 2, 2, 2.0) - traffic.grid(PARTS, 24, 2, 2)
    assert more == pytest.approx(scattered / 2 + weights / 4)
