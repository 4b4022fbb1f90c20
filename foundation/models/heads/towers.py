"""Models with a tower for images and a tower for texts (CLIP, SigLIP), whose vectors are of one space.

    v = project(tower(row));  v = v / max(|v|, 1e-12)       float [n, D]

A run has **one checkpoint with both towers**, and its rows are images and texts side by side: `forward` answers the rows whose features it
gets, with a vector each. Training, calibration, evaluation, comparison, cache and report thus see one model that answers with vectors, as
every embedding does. Only where a graph is written do towers part: a build holds a folder for each tower (`export.towers`), an engine opens
both (`export.engines.towers`), and the repository gets a model for each (`triton_repo.towers`).

The other way, a run for each tower, was left out: the figure that counts needs both towers, and a user would have to join two runs.

    type       text tower
    clip       causal, read at the end token: nothing after it changes a vector, so that rows may be padded to any length
    siglip     reads all positions without a mask, padding too, and is read at the last one: every row is padded to the same length, that
               of its positions (https://arxiv.org/abs/2303.15343; SigLIP 2 with images of one size is of this type)

Not supported: SigLIP 2 for images of any size, whose image tower reads patches and their masks; models with other towers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from foundation.core.errors import InputError
from foundation.core.named import one_of
from foundation.models.library import in_place_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SMALLEST_NORM = 1e-12
FIRST_SCALE, FIRST_BIAS = math.log(10), -10.0
"""Logarithm of the scale, and the bias, that a SigLIP starts with (https://arxiv.org/abs/2303.15343, section 3.2)."""
CAUSAL_TEXT = {"clip": True, "siglip": False}
"""The types of models that are supported, and whether their text tower is causal."""


@dataclass
class Vectors:
    """Output of a model with two towers."""

    logits: Tensor
    """Vectors of the images, then vectors of the texts, float `[n, D]`."""


def check_towers(config: PreTrainedConfig, key: str, max_length: int | None = None) -> None:
    """Checks that a model has two towers of a kind that is supported, and reads texts of this length.

    Args:
        config: A Transformers config.
        key: Key path of the model, for messages.
        max_length: Maximum number of tokens, if known.

    Raises:
        InputError: It has not, or it reads texts of another length.
    """
    if config.model_type not in CAUSAL_TEXT:
        raise InputError(
            key, f"a {config.model_type} given", f"{one_of(list(CAUSAL_TEXT))} is allowed where an image and a text get a vector each"
        )
    positions = config.text_config.max_position_embeddings
    if max_length is not None and not CAUSAL_TEXT[config.model_type] and max_length != positions:
        raise InputError(
            "data.max_length",
            f"{max_length} given",
            f"this {config.model_type} reads every text padded to its {positions} positions",
            f"give {positions}",
        )


def width_of(config: PreTrainedConfig) -> int:
    """Returns the numbers of a vector of the model with this Transformers config."""
    return int(config.projection_dim if config.model_type == "clip" else config.vision_config.hidden_size)


def with_first_scale(model: PreTrainedModel) -> PreTrainedModel:
    """Sets scale and bias of a SigLIP with random weights as its authors start, in place: 10 and -10; returns the model.

    Transformers starts at 1 and 0, from where they learn hundreds of times slower than the towers.
    """
    if hasattr(model, "logit_bias"):
        with torch.no_grad():
            model.logit_scale.fill_(FIRST_SCALE)
            model.logit_bias.fill_(FIRST_BIAS)
    return model


def tower_of(module: str) -> str:
    """Returns the tower, image or text, that a module or weight of `CLIPModel` and `SiglipModel` belongs to, by its path."""
    return "text" if module.startswith("text_") else "image"


@functools.cache
def towers_class(stock: Any) -> Any:
    """Returns a subclass of `CLIPModel` or `SiglipModel` whose `logits` are vectors of length 1; it keeps the stock name and weights.

    It has to be a class because Transformers calls the constructor itself when it loads weights.
    """

    class Towers(stock):  # type: ignore[misc]
        def forward(
            self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, pixel_values: Tensor | None = None
        ) -> Vectors:
            """Answers images `[a, C, H, W]`, texts `[b, S]`, or both.

            A mask of padding `[b, S]` is not read: after the end of a text nothing counts (`clip`), or everything does (`siglip`). What
            is added to scores, float `[1, 1, S, S]`, takes the place of the causal mask.
            """
            found = []
            if pixel_values is not None:
                found.append(self.get_image_features(pixel_values=pixel_values).pooler_output)
            if input_ids is not None:
                added = attention_mask if attention_mask is not None and attention_mask.ndim == 4 else None
                found.append(self.get_text_features(input_ids=input_ids, attention_mask=added).pooler_output)
            vectors_nD = found[0] if len(found) == 1 else torch.cat(found)
            return Vectors(functional.normalize(vectors_nD.float(), dim=1, eps=SMALLEST_NORM))

    return in_place_of(stock, Towers)
