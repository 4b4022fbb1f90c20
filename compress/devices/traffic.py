"""How many bytes a device sends in a step where several share each layer, by the shape of the mesh that they are put in.

A block is a chain of products Y = X W with X [t, k] and W [k, n]: queries, keys and values as one, the output projection, the first and the
last matrices of an FFN. Forward, and backward for dX = dY W^T and dW = X^T dY. Elements that each of p devices sends, of all products:

    1-D     W by columns, then by rows; activations whole        4 h t (p - 1) / p  for each attention and FFN
            Megatron, https://arxiv.org/abs/1909.08053, section 3
    1-D, sequence   tokens divided between them                  5 h t (p - 1) / p
            https://arxiv.org/abs/2205.05198
    grid    p = r c: r parts of the rows, c of the tokens and of W, which is also divided by r: `mesh: [r, c]`
            (5 h t + 3 sum k n) with the first / r (c - 1) / c and the second / c (r - 1) / r
    2-D     X, W and Y by rows and columns, p = q q              3 (t k + k n) (q - 1) / q^2
            SUMMA as in Optimus, https://arxiv.org/abs/2104.05343, section 3
    2.5-D   d layers of it share the rows, p = q q d             3 (t k / d + k n) (q - 1) / q^2 + 2 (d - 1) / d k n / q^2
            Tesseract, https://arxiv.org/abs/2105.14500, section 3
    3-D     X, W and Y on the faces of a cube, p = q^3           (3 t k + 3 k n + 2 t n) (q - 1) / q^3
            https://arxiv.org/abs/2105.14450, section 3

Every collective is counted as a ring sends it, the least that is possible: a gather or scatter of n elements among q devices sends
n (q - 1) / q, a sum twice as many. The papers count trees: log q in place of (q - 1) / q.

Left out: norms and biases, embeddings and heads, what devices that share the rows send besides, and layers with adapters or int8
arithmetic, each of which sums the gradient of what it reads by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.devices.spec import shown_bytes

if TYPE_CHECKING:
    from torch import nn

MOST_DEVICES = 4096
"""Largest mesh that is looked at for where a shape pays."""


@dataclass(frozen=True)
class Product:
    """A matrix product of a block, X [t, inputs] by W [inputs, outputs]."""

    inputs: int
    outputs: int


@dataclass(frozen=True)
class Part:
    """An attention or FFN: what 1-D sums once in each direction."""

    hidden: int
    """Numbers of a token that go in and come out."""
    products: tuple[Product, ...]


Parts = Sequence[Part]


def parts_of(model: nn.Module, key: str) -> list[Part]:
    """Returns the attentions and FFNs of all blocks of a model.

    Args:
        model: A Transformers model; its weights are not read.
        key: Key path in the recipe, for messages.

    Raises:
        InputError: Its layers cannot be shared; see `foundation.models.architecture.split.split_of`.
    """
    from torch import nn

    from foundation.models.architecture.split import split_of

    found = []
    for columns, row in split_of(model, 1, key).regions:
        first, last = [model.get_submodule(name) for name in columns], model.get_submodule(row)
        assert isinstance(last, nn.Linear), row
        width = sum(layer.out_features for layer in first if isinstance(layer, nn.Linear))
        found.append(Part(last.out_features, (Product(_inputs(first[0]), width), Product(last.in_features, last.out_features))))
    return found


def _inputs(layer: nn.Module) -> int:
    size = layer.in_features
    assert isinstance(size, int), layer
    return size


def one_d(parts: Parts, tokens: int, devices: int) -> float:
    """Returns the elements that a device sends with `tensor: devices`."""
    return sum(4 * part.hidden for part in parts) * tokens * _ring(devices)


def one_d_sequence(parts: Parts, tokens: int, devices: int, scatter: float = 1.0) -> float:
    """Returns the elements that a device sends with `tensor: devices` and `sequence`: three gathers and two scatters.

    Args:
        parts: The attentions and FFNs of the model.
        tokens: Tokens of a step.
        devices: Number of devices.
        scatter: What a scatter sends over what a gather sends; gloo sums instead, which is twice as much.
    """
    return sum((3 + 2 * scatter) * part.hidden for part in parts) * tokens * _ring(devices)


def grid(parts: Parts, tokens: int, rows: int, columns: int, scatter: float = 1.0) -> float:
    """Returns the elements that a device sends with `mesh: [rows, columns]`; `scatter` as in `one_d_sequence`."""
    weights = sum(one.inputs * one.outputs for part in parts for one in part.products)
    return one_d_sequence(parts, tokens, columns, scatter) / rows + (2 + scatter) * weights / columns * _ring(rows)


def two_d(parts: Parts, tokens: int, side: int) -> float:
    """Returns the elements that a device of a square mesh sends."""
    return two_and_a_half_d(parts, tokens, side, 1)


def two_and_a_half_d(parts: Parts, tokens: int, side: int, depth: int) -> float:
    """Returns the elements that a device of `depth` square meshes sends."""
    return sum(
        3 * (tokens * one.inputs / depth + one.inputs * one.outputs) / side * _ring(side)
        + 2 * _ring(depth) * one.inputs * one.outputs / side**2
        for part in parts
        for one in part.products
    )


def three_d(parts: Parts, tokens: int, side: int) -> float:
    """Returns the elements that a device of a cube sends."""
    return sum(
        (3 * tokens * one.inputs + 3 * one.inputs * one.outputs + 2 * tokens * one.outputs) / side**2 * _ring(side)
        for part in parts
        for one in part.products
    )


def _ring(devices: int) -> float:
    return (devices - 1) / devices


def shapes(devices: int) -> Iterator[tuple[str, str, Callable[[Parts, int], float]]]:
    """Yields every shape that so many devices can have: its kind, its name, and what a device sends in it."""
    yield "1-D", f"1-D of {devices}", lambda parts, tokens: one_d(parts, tokens, devices)
    yield "1-D, sequence", f"1-D of {devices}, sequence", lambda parts, tokens: one_d_sequence(parts, tokens, devices)
    for rows in range(2, devices // 2 + 1):
        if devices % rows == 0:
            columns = devices // rows
            yield "grid", f"grid of {rows} x {columns}", lambda parts, tokens, of=(rows, columns): grid(parts, tokens, *of)  # type: ignore[misc]
    for side in range(2, math.isqrt(devices) + 1):
        depth, left = divmod(devices, side**2)
        if not left and depth == 1:
            yield "2-D", f"2-D of {side} x {side}", lambda parts, tokens, side=side: two_d(parts, tokens, side)  # type: ignore[misc]
        elif not left and depth <= side:  # as Tesseract: deeper meshes are several that share the rows
            of = side, depth
            yield "2.5-D", f"2.5-D of {side} x {side} x {depth}", lambda parts, tokens, of=of: two_and_a_half_d(parts, tokens, *of)  # type: ignore[misc]
        if side**3 == devices:
            yield "3-D", f"3-D of {side} x {side} x {side}", lambda parts, tokens, side=side: three_d(parts, tokens, side)  # type: ignore[misc]


def best(parts: Parts, tokens: int, devices: int) -> dict[str, tuple[str, float]]:
    """Returns the best shape of each kind that so many devices can have: its name, and the elements that a device sends."""
    found: dict[str, tuple[str, float]] = {}
    for kind, name, sends in shapes(devices):
        elements = sends(parts, tokens)
        if kind not in found or elements < found[kind][1]:
            found[kind] = name, elements
    return found


def pays_from(parts: Parts, tokens: int) -> Mapping[str, int | None]:
    """Returns by kind the smallest number of devices, up to `MOST_DEVICES`, of which each sends less than with 1-D; None: no number."""
    found: dict[str, int | None] = dict.fromkeys(("grid", "2-D", "2.5-D", "3-D"))
    numbers = sorted({2**power for power in range(2, 13)} | {side**2 for side in range(2, 65)} | {side**3 for side in range(2, 17)})
    for devices in (number for number in numbers if number <= MOST_DEVICES):
        shaped = best(parts, tokens, devices)
        for kind in found:
            if found[kind] is None and kind in shaped and shaped[kind][1] < shaped["1-D"][1]:
                found[kind] = devices
    return found


def describe(parts: Parts, tokens: int, devices: int, size: int) -> list[str]:
    """Returns the lines of a plan about sharing each layer.

    Args:
        parts: The attentions and FFNs of the model.
        tokens: Tokens of a step.
        devices: Number of devices.
        size: Bytes of an element.
    """
    shown = ", ".join(f"{name} {shown_bytes(size * elements)}" for name, elements in best(parts, tokens, devices).values())
    lines = [f"layers shared by all {devices} devices, bytes that each sends in a step of {tokens} tokens: {shown}"]
    never = f"not up to {MOST_DEVICES}"
    pays = ", ".join(f"{kind} {f'from {number} devices on' if number else never}" for kind, number in pays_from(parts, tokens).items())
    return [*lines, f"less than 1-D: {pays}"]
