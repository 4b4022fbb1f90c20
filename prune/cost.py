"""What the blocks of a model cost, as a function of their sizes: what `sparsity` is a share of.

    macs        multiply-accumulates of the linear layers for one token: the entries of their weights, of experts those that a token goes to
    parameters  entries of all weights, biases and norms included
    latency     milliseconds of the first engine of the target at one shape, from a measured table (`prune.latency_table`)

The first two are computed from the shapes of the weights alone: an axis gets its new length, whatever it runs over. The products Q K^T
and P V have no weights; they shrink as the heads do. Embeddings, pooler and head are no part of it: surgery inside the blocks does not
change them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from compress.models.axes import Axis
from compress.models.structure import Sizes, Structure

Measure = Literal["macs", "parameters", "latency"]
Component = Literal["heads", "ffn", "experts"]
"""What is pruned block by block; heads are counted in groups that share keys and values."""


class Costs(Protocol):
    """What the blocks of one model cost, in whatever unit."""

    @property
    def structure(self) -> Structure:
        """That of the model."""

    @property
    def experts_per_token(self) -> int:
        """Experts that a token goes to; 0 without experts."""

    def total(self, sizes: Sizes | None = None, blocks: Sequence[int] | None = None) -> float:
        """Returns the cost of all blocks, or of some; as they are, or with other sizes of the same layers."""

    def unit(self, number: int, what: Component, sizes: Sizes) -> float:
        """Returns what one group of heads, one neuron or one expert of a block costs, on average."""

    def prices(self, number: int, what: Component) -> tuple[float, ...]:
        """Returns what 0, 1, ... of them cost beside the rest of the block; nothing where all cost the same."""

    def expected(self, counts: Mapping[tuple[int, Component], Tensor], hidden: Tensor | int, present_L: Tensor) -> Tensor:
        """Returns the cost of all blocks, float32 `[]`, differentiable in everything that is given.

        Args:
            counts: Groups of heads and neurons of each block, float `[]` each; those that are absent are as they are.
            hidden: Channels.
            present_L: Share of each block that is there, float `[L]`.
        """


@dataclass(frozen=True)
class Cost:
    """The cost of the blocks of one model, from the shapes of its weights."""

    structure: Structure
    shapes: Mapping[str, Sequence[int]]
    """Of all weights."""
    measure: Literal["macs", "parameters"]
    experts_per_token: int
    """Experts that a token goes to; 0 without experts."""

    @classmethod
    def of(cls, model: nn.Module, structure: Structure, measure: Literal["macs", "parameters"]) -> Cost:
        """Returns the cost of a model; its weights are not looked at."""
        config: Any = model.config
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        return cls(structure, shapes, measure, getattr(config, "num_experts_per_tok", 0) or 0)

    def total(self, sizes: Sizes | None = None, blocks: Sequence[int] | None = None) -> float:
        """Returns the cost of all blocks, or of some; as they are, or with other sizes of the same layers."""
        sizes = sizes or self.structure.sizes
        return sum(self.block(number, sizes) for number in (range(self.structure.depth) if blocks is None else blocks))

    def block(self, number: int, sizes: Sizes) -> float:
        """Returns the cost of one block."""
        prefix = f"{self.structure.prefix}.{number}."
        return sum(self._weight(name, number, sizes) for name in self.shapes if name.startswith(prefix))

    def unit(self, number: int, what: Component, sizes: Sizes) -> float:
        """Returns what one group of heads, one neuron or one expert of a block costs; the cost is linear in each of them."""
        return (self.block(number, sizes) - self.block(number, with_count(sizes, number, what, 0))) / count_of(sizes, number, what)

    def prices(self, number: int, what: Component) -> tuple[float, ...]:
        """Returns nothing: every group of heads costs the same, and so does every neuron and expert."""
        return ()

    def expected(self, counts: Mapping[tuple[int, Component], Tensor], hidden: Tensor | int, present_L: Tensor) -> Tensor:
        """Returns the cost of all blocks, float32 `[]`, of numbers that need not be whole; see `Costs`."""
        sizes: Any = replace(self.structure.sizes, hidden=hidden)  # type: ignore[arg-type]
        for (number, what), count in counts.items():
            sizes = with_count(sizes, number, what, count)  # type: ignore[arg-type]
        costs: Any = [self.block(number, sizes) for number in range(self.structure.depth)]
        total: Tensor = sum(present_L[number] * cost for number, cost in enumerate(costs))
        return total

    def _weight(self, name: str, number: int, sizes: Sizes) -> float:
        shape, experts = self.shapes[name], self.structure.experts[number]
        counts_macs = self.measure == "macs"
        if counts_macs and len(shape) < 2:
            return 0.0
        cost = 1.0
        for axis, length in enumerate(shape):
            some = counts_macs and len(shape) == 3 and (name, axis) in experts  # a token goes to some of the experts only
            cost *= self.experts_per_token if some else self._length((name, axis), length, number, sizes)
        return cost

    def _length(self, axis: Axis, length: int, number: int, sizes: Sizes) -> float:
        """Returns the length of an axis with these sizes."""
        before = self.structure.sizes
        if axis in self.structure.residual:
            return sizes.hidden
        if axis in self.structure.heads[number]:
            return length * sizes.key_value_heads[number] / before.key_value_heads[number]
        if axis in self.structure.ffn[number]:
            return length * sizes.ffn[number] / before.ffn[number]
        if axis in self.structure.experts[number]:
            return length * sizes.experts[number] / before.experts[number]
        return length


def count_of(sizes: Sizes, number: int, what: Component) -> int:
    """Returns how many groups of heads, neurons or experts a block has."""
    return {"heads": sizes.key_value_heads, "ffn": sizes.ffn, "experts": sizes.experts}[what][number]


def with_count(sizes: Sizes, number: int, what: Component, count: int) -> Sizes:
    """Returns the sizes of a model with another number of groups of heads, neurons or experts in one block."""

    def changed(values: Sequence[int], value: int) -> tuple[int, ...]:
        return (*values[:number], value, *values[number + 1 :])

    if what == "heads":
        group = sizes.heads[number] // sizes.key_value_heads[number]
        return replace(sizes, heads=changed(sizes.heads, group * count), key_value_heads=changed(sizes.key_value_heads, count))
    if what == "ffn":
        return replace(sizes, ffn=changed(sizes.ffn, count))
    return replace(sizes, experts=changed(sizes.experts, count))
