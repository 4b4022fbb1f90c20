"""The cost of a model's blocks as a function of their sizes; `sparsity` is the share of it to remove.

    macs        multiply-accumulates of the linear layers per token: entries of their weights; with experts only those that a token visits
    parameters  entries of all weights, including biases and norms
    latency     milliseconds on the first engine of the target at one shape, from a measured table (`prune.latency.table`)

macs and parameters follow only from the shapes of the weights: each axis gets its new length. The products Q K^T and P V have no weights
and are not counted; they shrink with the heads. Embeddings, pooler and head are not counted either, since pruning the blocks leaves them
as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from foundation.models.layers.expert_names import VISITED, numbered

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

    from foundation.models.architecture.axes import Axis
    from foundation.models.architecture.structure import Sizes, Structure

Measure = Literal["macs", "parameters", "latency"]
Component = Literal["heads", "cross", "ffn", "experts"]
"""Prunable parts of a block; heads are counted in groups that share keys and values. `cross` are the heads that read an encoder."""
GATED: tuple[Component, ...] = ("heads", "cross", "ffn")
"""Components whose units are inputs of one layer, which a factor can close."""


class CostModel(Protocol):
    """The cost of the blocks of one model, in any unit."""

    @property
    def structure(self) -> Structure:
        """Structure of the model."""

    @property
    def experts_per_token(self) -> int:
        """Experts that a token visits; 0 without experts."""

    def total(self, sizes: Sizes | None = None, blocks: Sequence[int] | None = None) -> float:
        """Returns the cost of all blocks, or of the given ones; `sizes` replaces the sizes of the same layers."""

    def unit(self, number: int, what: Component, sizes: Sizes) -> float:
        """Returns the mean cost of one head group, FFN neuron or expert of a block."""

    def prices(self, number: int, what: Component) -> tuple[float, ...]:
        """Returns the cost that 0, 1, 2, ... units add to the rest of the block; empty if all units cost the same."""

    def expected(self, counts: Mapping[tuple[int, Component], Tensor], hidden: Tensor | int, present_L: Tensor) -> Tensor:
        """Returns the cost of all blocks, float32 `[]`, differentiable in all arguments.

        Args:
            counts: Head groups and FFN neurons by block, float `[]` each; absent ones keep their size.
            hidden: Number of channels.
            present_L: Probability that each block is kept, float `[L]`.
        """


@dataclass(frozen=True)
class ShapeCost:
    """The cost of one model's blocks in macs or parameters, from the shapes of its weights."""

    structure: Structure
    shapes: Mapping[str, Sequence[int]]
    """Shapes of all weights by name."""
    measure: Literal["macs", "parameters"]
    experts_per_token: int
    """Experts that a token visits; 0 without experts."""

    @classmethod
    def of(cls, model: nn.Module, structure: Structure, measure: Literal["macs", "parameters"]) -> ShapeCost:
        """Returns the cost of a model; reads only the shapes of its weights."""
        config: PreTrainedConfig = model.config
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        return cls(structure, shapes, measure, getattr(config, "num_experts_per_tok", 0) or VISITED.get(config.model_type, 0))

    def total(self, sizes: Sizes | None = None, blocks: Sequence[int] | None = None) -> float:
        """Returns the cost of all blocks, or of the given ones; `sizes` replaces the sizes of the same layers."""
        sizes = sizes or self.structure.sizes
        return sum(self.block(number, sizes) for number in (range(self.structure.depth) if blocks is None else blocks))

    def block(self, number: int, sizes: Sizes) -> float:
        """Returns the cost of one block."""
        prefix = f"{self.structure.blocks[number]}."
        return sum(self._weight(name, number, sizes) for name in self.shapes if name.startswith(prefix))

    def unit(self, number: int, what: Component, sizes: Sizes) -> float:
        """Returns the cost of one head group, FFN neuron or expert of a block; the block's cost is linear in their number."""
        return (self.block(number, sizes) - self.block(number, with_count(sizes, number, what, 0))) / count_of(sizes, number, what)

    def prices(self, number: int, what: Component) -> tuple[float, ...]:
        """Returns an empty tuple: all head groups of a block cost the same, as do all neurons and all experts."""
        return ()

    def expected(self, counts: Mapping[tuple[int, Component], Tensor], hidden: Tensor | int, present_L: Tensor) -> Tensor:
        """Returns the cost of all blocks at fractional sizes, float32 `[]`; see `CostModel`."""
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
        if experts and numbered(name) is not None:  # one of several weights, of which as many stay as experts do
            of_block = self.experts_per_token if counts_macs else sizes.experts[number]
            cost = of_block / self.structure.sizes.experts[number]
        for axis, length in enumerate(shape):
            some = counts_macs and len(shape) == 3 and (name, axis) in experts  # a token visits only some of the experts
            cost *= self.experts_per_token if some else self._length((name, axis), length, number, sizes)
        return cost

    def _length(self, axis: Axis, length: int, number: int, sizes: Sizes) -> float:
        """Returns the length of an axis at these sizes."""
        before = self.structure.sizes
        if axis in self.structure.residual:
            return sizes.hidden
        if axis in self.structure.heads[number]:
            return length * sizes.key_value_heads[number] / before.key_value_heads[number]
        if axis in self.structure.cross[number]:
            return length * sizes.cross[number] / before.cross[number]
        if axis in self.structure.ffn[number]:
            return length * sizes.ffn[number] / before.ffn[number]
        if axis in self.structure.experts[number]:
            return length * sizes.experts[number] / before.experts[number]
        return length


def count_of(sizes: Sizes, number: int, what: Component) -> int:
    """Returns the number of head groups, FFN neurons or experts of a block."""
    if what == "cross":
        return sizes.cross[number] if sizes.cross else 0
    return {"heads": sizes.key_value_heads, "ffn": sizes.ffn, "experts": sizes.experts}[what][number]


def width_of(structure: Structure, number: int, what: Component) -> int:
    """Returns how many inputs of the layer that reads a component belong to each of its units: the dimensions of a head group, or 1."""
    found = structure.of_heads(number, what) if what in ("heads", "cross") else None
    return found[0].group * found[0].head_dim if found is not None else 1


def with_count(sizes: Sizes, number: int, what: Component, count: int) -> Sizes:
    """Returns the sizes with another number of head groups, FFN neurons or experts in one block."""

    def changed(values: Sequence[int], value: int) -> tuple[int, ...]:
        return (*values[:number], value, *values[number + 1 :])

    if what == "heads":
        group = sizes.heads[number] // sizes.key_value_heads[number]
        return replace(sizes, heads=changed(sizes.heads, group * count), key_value_heads=changed(sizes.key_value_heads, count))
    if what == "cross":
        return replace(sizes, cross=changed(sizes.cross, count))
    if what == "ffn":
        return replace(sizes, ffn=changed(sizes.ffn, count))
    return replace(sizes, experts=changed(sizes.experts, count))
