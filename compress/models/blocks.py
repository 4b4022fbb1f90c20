"""The repeated blocks of a Transformer, found by structure: the largest `nn.ModuleList` whose entries are all of one class.

Nothing is looked up by the name of a model. Depth is written through `num_hidden_layers`, the name under which every Transformers
config answers; whatever a config says for each layer is cut along with it: lists of as many entries as layers (layer types, which layers
turn positions, the sizes of `compress.models.shapes`) and, of `INDEX_LISTS`, lists of numbers of layers.
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
from compress.models.library import quiet
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
"""Under these names configs list numbers of layers."""
OTHER_LISTS = ("architectures", "image_size", "patch_size", "out_features", "out_indices", "pos_att_type")
"""Under these they list what has nothing to do with layers, however many entries it has; so do names that end in `_token_id`."""


@dataclass(frozen=True)
class Kind:
    """A class of models and a config: what is found on the meta device depends on nothing else, and is remembered by it."""

    model_class: Any
    text: str
    """The config as JSON: what it is compared by."""
    config: Any = field(compare=False)

    @classmethod
    def of(cls, model: nn.Module) -> Kind:
        """Returns the kind of a model."""
        config: Any = model.config
        return cls(type(model), config.to_json_string(), config)

    def make(self, config: Any) -> Any:
        """Returns a model of this class and another config on the meta device, its `Conv1D` as linear layers.

        Raises:
            ValueError, TypeError, ...: What Transformers raises for a config that makes no model.
        """
        from transformers.initialization import no_init_weights

        with torch.device("meta"), no_init_weights(), quiet():  # nothing is drawn that nobody looks at
            return with_linears(self.model_class(config))


def repeated_blocks(model: nn.Module, key: str) -> tuple[str, nn.ModuleList]:
    """Returns the repeated blocks of a model and their module name.

    Args:
        model: A Transformers model.
        key: Key path in the recipe, for the message.

    Raises:
        InputError: There are none, or their number is not that of the config (ALBERT shares one block between all layers).
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    alike = [(name, module) for name, module in lists if len({type(block) for block in module}) == 1]
    kind, depth = model.config.model_type, getattr(model.config, "num_hidden_layers", None)  # type: ignore[union-attr]
    if not alike:
        raise InputError(f"{key}: this {kind} has no list of repeated blocks; an encoder or decoder of stacked blocks is needed")
    name, blocks = max(alike, key=lambda entry: sum(parameter.numel() for parameter in entry[1].parameters()))
    if len(blocks) != depth:
        raise InputError(f"{key}: this {kind} has {len(blocks)} blocks for {depth} layers; one block a layer is needed")
    return name, blocks


def states_given(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Returns the hidden states among what a block is called with, by place or by name."""
    states: Tensor = args[0] if args else kwargs["hidden_states"]
    return states


def states_of(output: Any) -> Tensor:
    """Returns the hidden states among what a block gives, which may be a tuple."""
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


@contextmanager
def between_blocks(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Keeps what goes into the first of some blocks and what comes out of each, float `[b, L, D]`, in a list that a forward pass fills.

    The list that Transformers gives ends with a normed state in a decoder; here none is.
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
    """Returns a copy of a Transformers config with the given layers, counted from 0, and no others."""
    changed, depth = copy.deepcopy(config), config.num_hidden_layers
    changed.num_hidden_layers = len(layers)
    for name, value in vars(config).items():
        if not isinstance(value, list | tuple) or name in OTHER_LISTS or name.startswith("_") or name.endswith("_token_id"):
            continue
        if name in INDEX_LISTS:
            setattr(changed, name, type(value)(number for number, layer in enumerate(layers) if layer in value))
        elif len(value) == depth:
            setattr(changed, name, type(value)(value[layer] for layer in layers))
    own = getattr(config, SHAPE_KEY, None)
    if own:
        cut = {name: [value[layer] for layer in layers] for name, value in own.items() if isinstance(value, list)}
        setattr(changed, SHAPE_KEY, {**own, **cut})
    return changed
