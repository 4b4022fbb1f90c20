"""The images that a model reads, from its config."""

from __future__ import annotations

from typing import Any

ANY_SIZE = 224
"""Edge of an image for models that take any size, whose config names none (ResNet)."""


def image_shape(config: Any) -> tuple[int, int, int]:
    """Returns channels, height and width of the images of a model, also of one with a vision config inside (CLIP)."""
    own = getattr(config, "vision_config", None) or config
    size = getattr(own, "image_size", None) or ANY_SIZE
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(getattr(own, "num_channels", 3)), int(height), int(width)
