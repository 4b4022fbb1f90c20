"""Finds the repeated blocks of a Transformer: the largest `nn.ModuleList` whose entries all have the same class.

Models are not looked up by name. Depth is set through `num_hidden_layers`, which every Transformers config accepts. Per-layer entries of a
config are cut along with it: lists with one entry per layer (layer types, RoPE per layer, the sizes of `compress.models.shapes`), and the
lists of layer indices in `INDEX_LISTS`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compress.core.errors import InputError
from compress.models.conv1d import with_linears
from compress.models.library import quiet, sizes_config
from compress.models.meta import on_meta_device
from compress.models.own_shape import SHAPE_KEY

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
OTHER_LISTS = ("architectures", "image_size", "patch_size", "out_features", "out_indices", "pos_att_type")
"""Config keys whose lists are unrelated to layers, whatever their length; keys that end in `_token_id` are too."""


@dataclass(frozen=True)
class Kind:
    """A model class with a config: the cache key of everything found on the meta device, which depends on nothing else."""

    model_class: Any
    text: str
    """The config as JSON; used for comparison."""
    config: Any = field(compare=False)

    @classmethod
    def of(cls, model: nn.Module) -> Kind:
        """Returns the kind of a model."""
        config: Any = model.config
        return cls(type(model), config.to_json_string(), config)

    def make(self, config: Any, on_meta: bool = True) -> Any:
        """Builds a model of this class from another config, with `nn.Linear` in place of `Conv1D` and weights that are not initialized.

        Args:
            config: The config.
            on_meta: Whether to build it on the meta device, else on the CPU.

        Raises:
            ValueError, TypeError, ...: Whatever Transformers raises for an unusable config; see `compress.models.library.REFUSED`.
        """
        from transformers.initialization import no_init_weights

        with on_meta_device() if on_meta else torch.device("cpu"), no_init_weights(), quiet():
            return with_linears(self.model_class(config))


def repeated_blocks(model: nn.Module, key: str) -> tuple[str, nn.ModuleList]:
    """Returns the repeated blocks of a model and their module name.

    Args:
        model: A Transformers model.
        key: Key path in the recipe, for the message.

    Raises:
        InputError: There are none, or their number differs from the config (ALBERT shares one block between all layers).
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    alike = [(name, module) for name, module in lists if len({type(block) for block in module}) == 1]
    config: Any = model.config
    kind, depth = config.model_type, getattr(sizes_config(config), "num_hidden_layers", None)
    if depth is None:
        raise InputError(f"{key}: this {kind} is made of stages of different sizes; a stack of equal blocks is needed")
    if not alike:
        raise InputError(f"{key}: this {kind} has no list of repeated blocks; an encoder or decoder of stacked blocks is needed")
    name, blocks = max(alike, key=lambda entry: sum(parameter.numel() for parameter in entry[1].parameters()))
    if len(blocks) != depth:
        raise InputError(f"{key}: this {kind} has {len(blocks)} blocks for {depth} layers; one block per layer is needed")
    return name, blocks


def states_given(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
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

    def before(block: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        states.append(states_given(args, kwargs))

    def after(block: nn.Module, args: Any, output: Any) -> None:
        states.append(states_of(output))

    handles = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks[:1]]
    handles += [block.register_forward_hook(after) for block in blocks]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def with_layers(config: Any, layers: Sequence[int]) -> Any:
    """Returns a copy of a Transformers config reduced to the given layers, counted from 0."""
    changed = copy.deepcopy(config)
    before, own = sizes_config(config), sizes_config(changed)
    depth, own.num_hidden_layers = before.num_hidden_layers, len(layers)
    for name, value in vars(before).items():
        if not isinstance(value, list | tuple) or name in OTHER_LISTS or name.startswith("_") or name.endswith("_token_id"):
            continue
        if name in INDEX_LISTS:
            setattr(own, name, type(value)(number for number, layer in enumerate(layers) if layer in value))
        elif len(value) == depth:
            setattr(own, name, type(value)(value[layer] for layer in layers))
    if len(getattr(own, "stage_names", None) or ()) == depth + 1:  # a backbone names its stem and its layers
        own.stage_names = own.stage_names[: len(layers) + 1]
        own._out_features, own._out_indices = own.stage_names[-1:], [len(layers)]
    shape = getattr(config, SHAPE_KEY, None)
    if shape:
        cut = {name: [value[layer] for layer in layers] for name, value in shape.items() if isinstance(value, list)}
        setattr(changed, SHAPE_KEY, {**shape, **cut})
    return changed
