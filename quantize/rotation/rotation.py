"""Rotates the residual stream and the values of attention, so that no channel is much larger than the others; exact in float.

    R1 [D, D]     the stream x becomes x R1: in the embeddings, in all that reads and writes the stream, and in the head
    R2 [d, d]     one for each layer: the values of all its heads become v R2, and the output projection takes it off again

Norms over the stream are made neutral first (`foundation.models.architecture.residual`). A norm without gain divides by the length of x,
which an orthogonal R1 does not change: norm(x R1) = norm(x) R1. In an attention every head mixes positions and not channels, so that R2
passes through; one R2 for all heads of a layer also suits query heads that share values.

    embeddings  E -> E R1          readers   W -> W diag(g) R1       writers   W -> R1^T W,  b -> R1^T b
    values      W -> R2^T W, b -> R2^T b by head                     output    W -> W R2 by head

R1 and R2 are randomized Hadamard matrices (`quantize.rotation.orthogonal`). The result is a stock model. A head that is tied to the
embeddings becomes a matrix of its own, as it takes the gain of the last norm: a vocabulary of V tokens costs V D weights more.

R1 and R2 are QuaRot's (Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456) and SpinQuant's (Liu et al. 2024,
https://arxiv.org/abs/2405.16406), which learns them from there (`quantize.rotation.learned`). Left out: their rotations of queries and
keys, and of the inputs of W_down, which no weight can absorb, so that an engine would have to multiply at run time.

Every rotated model is compared with itself before, on a few rows.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.architecture.attention import Attention, probe
from foundation.models.architecture.axes import keys_of, size_of
from foundation.models.architecture.blocks import Kind, with_layers
from foundation.models.architecture.residual import Read, Stream, fold, owner_of, stream_of
from foundation.models.architecture.shapes import on_meta, remade
from foundation.models.architecture.structure import HEAD_KINDS, Structure, head_pieces, is_interleaved
from foundation.models.forward import forward
from foundation.models.layers.experts import is_stacked
from foundation.models.library import REFUSED, depths_of, sizes_config
from foundation.models.own_shape import SHAPE_KEY
from foundation.models.tied import apart, shared_names
from quantize.rotation.orthogonal import Rotation, mean_preserving, randomized_hadamard

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOLERANCE = 1e-3
"""Largest difference of an output of the rotated model in float32, relative to the largest output."""
PART_BYTES = 64 * 2**20
"""Float64 bytes of a table that are rotated at once."""
Method = Literal["hadamard", "learned"]
SMALL = 128
"""Tokens and FFN neurons of the model that is tried before anything runs, at most."""


@dataclass(frozen=True)
class Turn:
    """The rotation of an axis of a weight."""

    axis: int
    rotation: Rotation
    indices: Tensor | None = None
    """Entries of the axis that are rotated, piece after piece of the size of the rotation, int64; None for all."""

    def of(self, values: Tensor) -> Tensor:
        """Returns the rotated weight, float64."""
        last = values.movedim(self.axis, -1)
        indices = None if self.indices is None else self.indices.to(values.device)
        chosen = last if indices is None else last[..., indices]
        turned = self.rotation.of(chosen.reshape(-1, self.rotation.size)).reshape(chosen.shape)
        if indices is not None:
            turned = last.clone().index_copy_(-1, indices, turned)
        return turned.movedim(-1, self.axis)


@dataclass(frozen=True)
class Rotations:
    """How the weights of a model change."""

    stream: Stream
    turns: Mapping[str, tuple[Turn, ...]]
    """By name of the weight."""

    @classmethod
    def of(cls, model: nn.Module, structure: Structure, stream: Stream, seed: int, *, values: bool) -> Rotations:
        """Draws the rotations of a model.

        Args:
            model: The model; its weights are not read and may be on the meta device.
            structure: Its structure.
            stream: Its residual stream.
            seed: Seed of the rotations.
            values: Whether the values of attention are rotated too.
        """
        generator = torch.Generator().manual_seed(seed)
        found = [*stream_turns(model, stream, generator), *(value_turns(structure, generator) if values else ())]
        turns: dict[str, tuple[Turn, ...]] = {}
        for name, turn in found:
            turns[name] = (*turns.get(name, ()), turn)
        return cls(stream, turns)

    def changed(self, names: Collection[str]) -> list[str]:
        """Returns those of some weights that change, in an order in which each can replace the old one."""
        folded = self.stream.changed(names)
        return [name for name in names if name in self.turns and name not in set(folded)] + folded

    def write(self, name: str, read: Read, out: Tensor) -> None:
        """Computes a changed weight.

        Args:
            name: Its name.
            read: Returns a weight before the change, float of any dtype; of linear layers [O, I].
            out: Receives it; may be the weight itself.
        """
        values, turns = read(name), self.turns.get(name, ())
        rows = max(1, PART_BYTES // (8 * values[:1].numel()))
        if values.ndim != 2 or any(turn.axis == 0 for turn in turns):
            rows = len(values)
        for start in range(0, len(values), rows):
            found = self.stream.folded(name, values[start : start + rows], read)
            for turn in turns:
                found = turn.of(found)
            out[start : start + rows].copy_(found)

    def alike(self, names: Collection[str], read: Read) -> bool:
        """Whether some weights that share their values still share them afterwards."""
        axes = {tuple((turn.axis, id(turn.rotation)) for turn in self.turns.get(name, ())) for name in names}
        gains = [[(axis, norm) for (weight, axis), norm in self.stream.gains.items() if weight == name] for name in names]
        neutral = all(bool((self.stream.gain(norm, read) == 1).all()) for norms in gains for _, norm in norms)
        return len(axes) == 1 and (neutral or all(one == gains[0] for one in gains))


Learn = Callable[[nn.Module, Rotations], dict[str, object]]
"""Turns a rotated model further, in place; returns figures for the report."""


def stream_turns(model: nn.Module, stream: Stream, generator: torch.Generator) -> Iterable[tuple[str, Turn]]:
    """Yields how weights change with R1, by name."""
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    size = next(shapes[name][axis] for name, axis in sorted(stream.axes))
    rotation = (mean_preserving if stream.centred else randomized_hadamard)(size, generator)
    for name, axis in sorted(stream.axes):
        if owner_of(name) not in stream.norms or name.endswith(".bias"):
            yield name, Turn(axis, rotation)


def value_turns(structure: Structure, generator: torch.Generator) -> Iterable[tuple[str, Turn]]:
    """Yields how weights change with the R2 of each attention, by name."""
    for block in range(structure.depth):
        for kind in HEAD_KINDS:
            if (found := structure.of_heads(block, kind)) is None:
                continue
            attention, axes = found
            rotation = randomized_hadamard(attention.head_dim, generator)
            for (name, axis), parts in axes.items():
                if owner_of(name) == attention.output:
                    yield name, Turn(axis, rotation)
                elif any(what == "value" for what, _ in parts):
                    yield name, Turn(axis, rotation, value_indices(attention, parts))


def value_indices(attention: Attention, parts: Iterable[tuple[str, int]]) -> Tensor:
    """Returns the indices of the values, head by head, along an axis over head dimensions with these parts, int64."""
    ordered = [what for what, _ in parts]
    sizes = [attention.size(what) for what in ordered]
    if not is_interleaved(attention, [(what, 0) for what in ordered]):
        start = sum(sizes[: ordered.index("value")])
        return torch.arange(start, start + attention.size("value"))
    (unit,) = head_pieces(attention, [(what, 0) for what in ordered])
    unit //= attention.key_value_heads
    start = sum(size // attention.key_value_heads for size in sizes[: ordered.index("value")])
    heads = torch.arange(attention.key_value_heads)[:, None] * unit
    return (heads + start + torch.arange(attention.head_dim)).flatten()


def untie(model: Any, rotations: Rotations, read: Read) -> list[frozenset[str]]:
    """Unties, in place, weights that are no longer alike after the rotation; returns the names of each."""
    own = [group for group in shared_names(model) if not rotations.alike(group, read)]
    for group in own:
        apart(model, group)
        model.config.tie_word_embeddings = False
    return own


def added(model: nn.Module, own: Iterable[frozenset[str]]) -> int:
    """Returns how many weights a model has more that were tied before."""
    return sum((len(group) - 1) * model.get_parameter(min(group)).numel() for group in own)


def rotate(model: nn.Module, features: Mapping[str, Tensor], seed: int, key: str, learn: Learn | None = None) -> dict[str, object]:
    """Rotates a model, in place.

    Args:
        model: A float model in evaluation mode.
        features: A few rows.
        seed: Seed of the rotations.
        key: Key path of the setting, for messages.
        learn: Turns the rotated model further, in place; returns figures.

    Returns:
        The figures for the report: `method`, `size` (channels of the stream), `values` (whether R2 is there), `untied_weights` (how many
        weights a tied head adds), `difference` (of the outputs, relative to the largest), and what `learn` returns.

    Raises:
        InputError: The model cannot be rotated, or answers differently afterwards.
    """
    config: Any = model.config
    method: Method = "hadamard" if learn is None else "learned"
    values = try_rotation(config, key, method)
    structure = Structure.of(model, key)
    with torch.no_grad():
        expected = forward(model, features)
        stream = stream_of(model, structure, lambda: forward(model, features))
        rotations = Rotations.of(model, structure, stream, seed, values=values)
        untied = apply(model, rotations)
    learned = {} if learn is None else learn(model, rotations)
    with torch.no_grad():
        difference = difference_of(forward(model, features), expected)
    check_same(difference, config, key, method)
    return {**figures_of(structure, values, untied, difference, method), **learned}


def apply(model: nn.Module, rotations: Rotations) -> int:
    """Changes the weights of a model in place; returns how many weights it has more, as a head is no longer tied."""
    own = untie(model, rotations, model.get_parameter)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    seen: set[int] = set()
    with torch.no_grad():
        for name in rotations.changed(parameters):
            if id(parameters[name]) not in seen:
                rotations.write(name, parameters.__getitem__, parameters[name])
            seen.add(id(parameters[name]))
    return added(model, own)


def figures_of(structure: Structure, values: bool, untied: int, difference: float, method: Method = "hadamard") -> dict[str, object]:
    """Returns the figures of a rotation (`rotate`)."""
    size = structure.sizes.hidden
    return {"method": method, "size": size, "values": values, "untied_weights": untied, "difference": difference}


def describe(figures: Mapping[str, object]) -> str:
    """Returns a one-line summary of the figures of `rotate`."""
    values = (
        "and values rotated" if figures["values"] else "rotated; values of attention are not, as more than positions is mixed behind them"
    )
    untied = f", {figures['untied_weights']:,} weights more for a head of its own" if figures["untied_weights"] else ""
    learned = ""
    if figures["method"] == "learned":
        used = f"{figures['kept']} of {figures['steps']} steps used" if figures["kept"] else "no step is better than Hadamard matrices"
        learned = f", learned: loss {figures['loss_before']:.4g} before, {figures['loss']:.4g} after, {used}"
    return f"rotation: {figures['size']} channels {values}{untied}{learned}; outputs differ by {figures['difference']:.1e} of the largest"


def difference_of(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference of outputs, relative to the largest output."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny))


def check_same(difference: float, config: PreTrainedConfig, key: str, method: Method = "hadamard") -> None:
    """Raises InputError if a rotated model answers differently."""
    if not difference <= TOLERANCE:
        why = f"the outputs of this {config.model_type} change by {difference:.2g} of the largest one when its weights are rotated"
        raise InputError(key, f"{method} given", why, "give none")


def try_rotation(config: PreTrainedConfig, key: str, method: Method = "hadamard") -> bool:
    """Tries on a small model with random weights whether models of a config can be rotated; returns whether the values of attention can.

    Raises:
        InputError: They cannot; the message says why.
    """
    return _tried(Kind.of_config(config), key, method)


@functools.lru_cache(maxsize=16)
def _tried(kind: Kind, key: str, method: Method) -> bool:
    given, name, depths = f"{method} given", kind.config.model_type, depths_of(kind.config)
    if depths is None or len(depths) != 1:
        shape = "is made of stages of different sizes" if depths is None else "has two stacks of layers"
        raise InputError(key, given, f"a {name} {shape}, and one residual stream is rotated", "give none")
    with torch.random.fork_rng(devices=[]):
        model, features = _small(kind.config, key, given)
    structure = Structure.of(model, key)
    if method == "learned" and any(is_stacked(module) for module in model.modules()):
        raise InputError(key, given, f"a {name} has experts, whose rounding is not simulated", "give hadamard")

    def changed(change: Callable[[nn.Module], object]) -> float:
        before = forward(model, features)
        change(model)
        return difference_of(forward(model, features), before)

    with torch.no_grad():
        stream = stream_of(model, structure, lambda: forward(model, features))
        generator = torch.Generator().manual_seed(0)
        turned = {weight: (turn,) for weight, turn in stream_turns(model, stream, generator)}
        apart(model, [weight for group in shared_names(model) for weight in group])
        if stream.unread:
            why = f"no weight over the channels of the stream reads {stream.unread[0]} of a {name}, so that its gain cannot move into one"
            raise InputError(key, given, why, "give none")
        if not changed(lambda model: fold(model, stream)) <= TOLERANCE:
            why = f"the norms of a {name} lie on the residual stream, so that their gains cannot move into the layers that read it"
            raise InputError(key, given, why, "give none")
        if not changed(lambda model: apply(model, Rotations(stream, turned))) <= TOLERANCE:
            why = f"a {name} reads its residual stream with more than norms and the layers behind them"
            raise InputError(key, given, why, "give none")
        of_values: dict[str, tuple[Turn, ...]] = {weight: (turn,) for weight, turn in value_turns(structure, generator)}
        return changed(lambda model: apply(model, Rotations(stream, of_values))) <= TOLERANCE


def _small(config: PreTrainedConfig, key: str, given: str) -> tuple[Any, dict[str, Tensor]]:
    """Returns a model of the first two layers of a config with random weights, fewer tokens and neurons, and a row for it."""
    few = with_layers(config, range(min(2, sizes_config(config).num_hidden_layers)))
    fewer = copy.deepcopy(few)
    if not hasattr(few, SHAPE_KEY):
        own = sizes_config(fewer)
        for size in ("vocabulary", "ffn"):
            for entry in keys_of(few, size):
                setattr(own, entry, min(SMALL, size_of(few, size)))
        for entry in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(own, entry, None if entry == "pad_token_id" else 0)
    generator = torch.Generator().manual_seed(0)
    for tried in (fewer, few):
        try:
            model: Any = remade(on_meta(tried), tried).eval()
            model.config.use_cache = False
            with torch.no_grad():
                for parameter in model.parameters():  # gains differ from channel to channel, as they do after training
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
                features = probe(model, generator)
                forward(model, features)
        except REFUSED:
            continue
        return model, features
    raise InputError(key, given, f"a {config.model_type} with random weights cannot be run", "give none")
