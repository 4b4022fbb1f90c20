"""Finds the repeated blocks of a Transformer: the largest `nn.ModuleList` of as many entries as layers, all of the same class.

An encoder-decoder has two such lists, one inside its encoder and one inside its decoder: two stacks. Their blocks are numbered through, the
encoder's first, so that a layer is one number in every model.

Models are not looked up by name. Depth is set through `num_hidden_layers`, which every Transformers config accepts, and the depth of a
decoder through `DECODER_DEPTHS`. Per-layer entries of a config are cut along with it: lists with one entry per layer (layer types, RoPE per
layer, the sizes of `foundation.models.architecture.shapes`), and the lists of layer indices in `INDEX_LISTS`.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.layers.conv1d import with_linears
from foundation.models.library import DECODER_DEPTHS, SIDES, depths_of, quiet, sizes_config, uninitialized
from foundation.models.meta import on_meta_device
from foundation.models.own_shape import SHAPE_KEY

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

INDEX_LISTS = (
    "attn_layer_indices",
    "cross_attention_layers",
    "full_attn_idxs",
    "fullatt_block_indexes",
    "global_attn_indexes",
    "local_layer_ids",
    "mlp_only_layers",
    "moe_layers",
    "window_block_indices",
)
"""Config keys that list layer indices."""
OTHER_LISTS = ("architectures", "image_size", "patch_size", "out_features", "out_indices", "pos_att_type") + tuple(
    f"{part}_{size}" for part in ("conv", "tdnn") for size in ("dim", "kernel", "stride", "dilation")
)
"""Config keys whose lists are unrelated to layers, whatever their length; keys that end in `_token_id` are too."""

Arguments = tuple[Any, ...]
"""Positional arguments of a block."""
Keywords = dict[str, Any]
"""Keyword arguments of a block."""
Output = Tensor | tuple[Tensor, ...]
"""What a block returns: the hidden states, first if there is more."""


@dataclass(frozen=True)
class Kind:
    """A model class with a config: the cache key of everything found on the meta device, which depends on nothing else."""

    model_class: Any
    text: str
    """The config as JSON; used for comparison."""
    config: PreTrainedConfig = field(compare=False)

    @classmethod
    def of(cls, model: nn.Module) -> Kind:
        """Returns the kind of a model."""
        config: PreTrainedConfig = model.config
        return cls(type(model), config.to_json_string(), config)

    @classmethod
    def of_config(cls, config: PreTrainedConfig) -> Kind:
        """Returns the kind of a config by itself, a copy of which it holds; `make` is for kinds of models."""
        return cls(type(config), config.to_json_string(), copy.deepcopy(config))

    def make(self, config: PreTrainedConfig, on_meta: bool = True) -> PreTrainedModel:
        """Builds a model of this class from another config, with `nn.Linear` in place of `Conv1D` and weights that are not initialized.

        Args:
            config: The config.
            on_meta: Whether to build it on the meta device, else on the CPU.

        Raises:
            ValueError, TypeError, ...: Whatever Transformers raises for an unusable config; see `foundation.models.library.REFUSED`.
        """
        with on_meta_device() if on_meta else torch.device("cpu"), uninitialized(), quiet():
            return with_linears(self.model_class(config))


@dataclass(frozen=True)
class Stack:
    """The blocks of a model that run one after another."""

    prefix: str
    """Module name of the list of blocks."""
    first: int
    """Number of its first block; the blocks of all stacks are numbered through."""
    depth: int
    """Number of its blocks."""

    @property
    def numbers(self) -> range:
        """Numbers of its blocks."""
        return range(self.first, self.first + self.depth)

    @property
    def owner(self) -> str:
        """Module name of what holds the list of blocks: the encoder or the decoder."""
        return self.prefix.rpartition(".")[0]


def stacks_of(model: nn.Module, key: str) -> tuple[Stack, ...]:
    """Returns the stacks of a model: one, or one for its encoder and one for its decoder.

    Args:
        model: A Transformers model.
        key: Key path in the recipe, for the message.

    Raises:
        InputError: A stack has no repeated blocks, or their number differs from the config (ALBERT shares one block between all layers).
    """
    config: PreTrainedConfig = model.config
    kind, depths = config.model_type, depths_of(config)
    if depths is None:
        raise InputError(key, f"this {kind} is made of stages of different sizes", "a stack of equal blocks is needed")
    sides: list[Any] = [model]
    if len(depths) == len(SIDES):
        sides = [model.get_encoder(), model.get_decoder()]  # type: ignore[operator]
    names = {module: name for name, module in model.named_modules()}
    found: list[Stack] = []
    for side, depth in zip(sides, depths, strict=True):
        lists = [module for module in side.modules() if isinstance(module, nn.ModuleList) and len(module)]
        alike = [module for module in lists if len({type(block) for block in module}) == 1]
        if not alike:
            raise InputError(key, f"this {kind} has no list of repeated blocks", "an encoder or decoder of stacked blocks is needed")
        blocks = max(alike, key=lambda entry: (len(entry) == depth, sum(parameter.numel() for parameter in entry.parameters())))
        if len(blocks) != depth:
            raise InputError(key, f"this {kind} has {len(blocks)} blocks for {depth} layers", "one block per layer is needed")
        found.append(Stack(names[blocks], sum(stack.depth for stack in found), depth))
    return tuple(found)


def blocks_of(model: nn.Module, key: str) -> dict[str, nn.Module]:
    """Returns all blocks of a model by module name, in the order of their numbers; see `stacks_of`.

    Raises:
        InputError: As `stacks_of`.
    """
    names = [f"{stack.prefix}.{place}" for stack in stacks_of(model, key) for place in range(stack.depth)]
    return {name: model.get_submodule(name) for name in names}


def layer_name(stacks: Sequence[Stack], number: int) -> str:
    """Returns the name of a layer for users, counted from 1 on each side: "layer 2", or "layer 2 of the decoder"."""
    side = next(side for side, stack in enumerate(stacks) if number in stack.numbers)
    return f"layer {number - stacks[side].first + 1}" + (f" of the {SIDES[side]}" if len(stacks) > 1 else "")


def block_of(name: str, blocks: Sequence[str]) -> int | None:
    """Returns the number of the block that a module or weight is in; None if it is outside the blocks.

    Args:
        name: Name of the module or weight.
        blocks: Module names of all blocks.
    """
    return next((number for number, block in enumerate(blocks) if name == block or name.startswith(f"{block}.")), None)


def source_of(target: str, stacks: Sequence[Stack], layers: Sequence[int], weights: Container[str]) -> str:
    """Returns the name in a model of a weight of its copy that has some of its layers.

    A weight that only the first block of a stack has, such as T5's table of relative positions, which serves all blocks, is the source for
    the first block of the copy, wherever that block is from.

    Args:
        target: Name of the weight in the copy.
        stacks: Stacks of the model.
        layers: Its layers that the copy has, in order.
        weights: Names of its weights.
    """
    for stack in stacks:
        if target.startswith(f"{stack.prefix}."):
            place, _, rest = target.removeprefix(f"{stack.prefix}.").partition(".")
            kept = [layer - stack.first for layer in layers if layer in stack.numbers]
            name = f"{stack.prefix}.{kept[int(place)]}.{rest}"
            of_first = f"{stack.prefix}.0.{rest}"
            return of_first if int(place) == 0 and name not in weights and of_first in weights else name
    return target


def hidden_states_of(args: Arguments, kwargs: Keywords) -> Tensor:
    """Returns the hidden states from the arguments of a block: the first positional one, or `hidden_states`."""
    states: Tensor = args[0] if args else kwargs["hidden_states"]
    return states


def states_of(output: Any) -> Tensor:
    """Returns the hidden states from the output of a block, which may be a tuple."""
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


@contextmanager
def between_blocks(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Yields a list that a forward pass fills with the input of the first block and the output of each block, float `[b, L, D]`.

    Unlike `output_hidden_states` of Transformers, whose last state is normalized in a decoder, no state here is.
    """
    states: list[Tensor] = []

    def before(block: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        states.append(hidden_states_of(args, kwargs))

    def after(block: nn.Module, args: Arguments, output: Any) -> None:
        states.append(states_of(output))

    handles = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks[:1]]
    handles += [block.register_forward_hook(after) for block in blocks]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def with_layers(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """Returns a copy of a Transformers config reduced to the given layers, counted from 0 through all stacks (`stacks_of`)."""
    changed, depths = copy.deepcopy(config), depths_of(config)
    before, own = sizes_config(config), sizes_config(changed)
    depth = before.num_hidden_layers if depths is None else depths[0]
    if depths is not None and len(depths) > 1:
        name = next(name for name in DECODER_DEPTHS if hasattr(config, name))
        setattr(changed, name, sum(layer >= depth for layer in layers))
    ours = [layer for layer in layers if layer < depth]
    own.num_hidden_layers = len(ours)
    for name, value in vars(before).items():
        if not isinstance(value, list | tuple) or name in OTHER_LISTS or name.startswith("_") or name.endswith("_token_id"):
            continue
        if name in INDEX_LISTS:
            setattr(own, name, type(value)(number for number, layer in enumerate(ours) if layer in value))
        elif len(value) == depth:
            setattr(own, name, type(value)(value[layer] for layer in ours))
    if len(getattr(own, "stage_names", None) or ()) == depth + 1:  # a backbone names its stem and its layers
        own.stage_names = own.stage_names[: len(ours) + 1]
        own._out_features, own._out_indices = own.stage_names[-1:], [len(ours)]
    shape = getattr(config, SHAPE_KEY, None)
    if shape:
        cut = {name: [value[layer] for layer in layers] for name, value in shape.items() if isinstance(value, list)}
        setattr(changed, SHAPE_KEY, {**shape, **cut})
    return changed
