"""The images that a model reads, from its config."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ANY_SIZE = 224
"""Edge of an image for models that take any size, whose config names none (ResNet)."""


def image_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Returns channels, height and width of the images of a model, also of one with a vision config inside (CLIP)."""
    own = getattr(config, "vision_config", None) or config
    size = getattr(own, "image_size", None) or ANY_SIZE
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(getattr(own, "num_channels", 3)), int(height), int(width)


def image_settings(config: PreTrainedConfig) -> dict[str, object]:
    """Returns a plain preprocessor_config.json for a model: resize to its image size, scale to [-1, 1]."""
    channels, height, width = image_shape(config)
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": channels == 3,
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * channels,
        "image_std": [0.5] * channels,
    }
