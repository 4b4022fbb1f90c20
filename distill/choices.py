"""Choices about the student in the stage `distill`.

Reading a recipe imports this file, and not what makes a student: that needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from foundation.core.config import Config
from foundation.core.errors import InputError
from foundation.models.library import SIDES

Init = Literal["uniform", "every_second", "first", "last", "random"]
Choice = Init | Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
"""Which layers of a stack to keep: a rule, or a list counted from 1."""


class LayersOfSides(Config):
    """Numbers of layers of an encoder-decoder."""

    encoder: Annotated[int, Field(ge=1)] | None = None
    """Number of layers of the encoder to keep; absent: all."""
    decoder: Annotated[int, Field(ge=1)] | None = None
    """Number of layers of the decoder to keep; absent: all."""


class InitOfSides(Config):
    """Which layers of an encoder-decoder to keep."""

    encoder: Choice = "first"
    """Which layers of the encoder to keep, or a list counted from 1."""
    decoder: Choice = "first"
    """Which layers of the decoder to keep, or a list counted from 1."""


class Student(Config):
    """The model to train: the incoming one, some of its layers, another checkpoint, or another shape."""

    layers: Annotated[int, Field(ge=1)] | LayersOfSides | None = None
    """Number of layers to keep, of an encoder-decoder on either side, or {encoder: 6, decoder: 1}; absent: all."""
    init: Init | tuple[Annotated[int, Field(ge=1)], ...] | InitOfSides = "first"
    """Which layers to keep, or a list of layers counted from 1; random: new blocks between the original embeddings and head. Of an
    encoder-decoder on either side, or {encoder: uniform, decoder: [1, 6]}."""
    hidden: Annotated[int, Field(ge=1)] | None = None
    """Hidden size to keep: the most important channels; must be a multiple of the heads. Absent: all."""
    ffn: Annotated[int, Field(ge=1)] | None = None
    """Neurons to keep in each FFN: the most important ones. Absent: all."""
    heads: Annotated[int, Field(ge=1)] | None = None
    """Heads to keep in each layer: the most important ones; heads must not become wider. Absent: all."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Hub id or folder of another model to train instead, with its own tokenizer."""
    head: Literal["keep", "new"] = "new"
    """With `path`: keep the checkpoint's head, trained for this task, or create a new one."""
    config: dict[str, Any] | None = None
    """Trains a newly initialized model. Gives the Transformers config keys that differ from the incoming model, or, with `model_type`, from
    the defaults of another model type."""

    @model_validator(mode="after")
    def _one_source(self) -> Student:
        if self.path is not None and self.config is not None:
            raise ValueError("give either path or config")
        parts = [name for name in ("layers", "hidden", "ffn", "heads") if getattr(self, name) is not None]
        parts += ["init"] * (self.init != "first")
        if parts and (self.path is not None or self.config is not None):
            raise ValueError(f"{parts[0]} selects parts of the incoming model; remove it, or path and config")
        for side in range(len(SIDES)):
            number, init = self.of_stack(side)
            if isinstance(init, tuple) and (not init or len(init) != (number or len(init))):
                raise ValueError(f"init lists {len(init)} layers, layers is {number}; give the same number")
        if self.head != "new" and self.path is None:
            raise ValueError(f"head: {self.head} given; it applies only to another checkpoint: give path, or remove head")
        return self

    @property
    def is_narrower(self) -> bool:
        """Whether hidden size, FFN or heads are reduced."""
        return any(given is not None for given in (self.hidden, self.ffn, self.heads))

    def of_stack(self, side: int) -> tuple[int | None, Init | tuple[int, ...]]:
        """Returns the number of layers to keep of a stack, None for all, and which: 0 is the encoder or the only stack, 1 the decoder."""
        number = getattr(self.layers, SIDES[side]) if isinstance(self.layers, LayersOfSides) else self.layers
        return number, getattr(self.init, SIDES[side]) if isinstance(self.init, InitOfSides) else self.init

    def is_new(self, side: int) -> bool:
        """Whether the blocks of a stack are newly initialized."""
        return self.of_stack(side)[1] == "random"

    def chosen(self, depths: Sequence[int], key: str) -> list[int]:
        """Returns the layers to keep, counted from 0 through all stacks.

        Args:
            depths: Number of layers of each stack of the incoming model.
            key: Key path of the student, for error messages.

        Raises:
            InputError: The incoming model does not have these layers.
        """
        given = [name for name in ("layers", "init") if isinstance(getattr(self, name), LayersOfSides | InitOfSides)]
        if given and len(depths) == 1:
            raise InputError(
                f"{key}.{given[0]}", "given for encoder and decoder", "the incoming model has one stack of layers", "give one value"
            )
        found: list[int] = []
        for side, depth in enumerate(depths):
            number, init = self.of_stack(side)
            number = number or (len(init) if isinstance(init, tuple) else depth)
            owner = "the incoming model" if len(depths) == 1 else f"the {SIDES[side]} of the incoming model"
            found += [sum(depths[:side]) + layer for layer in chosen_layers(init, number, depth, key, owner)]
        return found


def chosen_layers(init: Init | Sequence[int], num_layers: int, depth: int, key: str, owner: str = "the incoming model") -> list[int]:
    """Returns which layers of a stack with `depth` layers a student of `num_layers` layers keeps, counted from 0.

    Args:
        init: Which layers.
        num_layers: How many.
        depth: Number of layers of the stack.
        key: Key path of the student, for error messages.
        owner: What has the stack, for error messages.

    Raises:
        InputError: The stack has fewer layers.
    """
    if num_layers > depth:
        raise InputError(f"{key}.layers", f"{num_layers} given", f"{owner} has {depth} layers")
    if init == "every_second" and 2 * num_layers - 1 > depth:
        raise InputError(
            f"{key}.init", "every_second given", f"it keeps at most {-(-depth // 2)} of {depth} layers, not {num_layers}", "give uniform"
        )
    if init == "last":
        return list(range(depth - num_layers, depth))
    if init == "every_second":
        return list(range(0, 2 * num_layers, 2))
    if init in ("first", "random"):
        return list(range(num_layers))
    if init == "uniform":  # integer arithmetic, so that halves always round up
        return [(2 * i * (depth - 1) + num_layers - 1) // (2 * max(1, num_layers - 1)) for i in range(num_layers)]
    assert not isinstance(init, str), init
    beyond = [layer for layer in init if layer > depth]
    if beyond:
        raise InputError(f"{key}.init", f"layer {beyond[0]} given", f"{owner} has layers 1 to {depth}")
    return [layer - 1 for layer in init]
