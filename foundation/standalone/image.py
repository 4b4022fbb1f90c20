"""Images: decoded by Pillow, rotated upright by their EXIF tag, and converted, resized and cropped as preprocessor_config.json says.

Rescaling and normalizing an 8-bit value v of channel c

    x = (float32(v * rescale_factor) - mean_c) / std_c

has only 256 possible results per channel, so it is a table look-up, precomputed with the same rounding as the Transformers processor.

Served models of images hold a copy of this file; it needs only numpy and Pillow. Not supported: images with more than 8 bits per channel,
and image processors with extra steps (crop_pct, reordered channels, patches); callers reject those.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG")
MAX_IMAGE_BYTES = 64 * 2**20
MAX_IMAGE_PIXELS = 64 * 10**6
MAX_EDGE = 2**14
LARGEST_FACTOR = 1e6
MODES = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"})


class BadImage(ValueError):
    """An image, or settings for images, cannot be used; the message says in one line what was given and what is allowed."""


def decode_image(data: bytes, draft: bool = False) -> Image.Image:
    """Decodes a PNG or JPEG image and turns it upright.

    Args:
        data: The encoded file.
        draft: Decode a JPEG at an eighth of its size, without rotating it: a quick check that the file is complete.

    Raises:
        BadImage: The data is not a complete PNG or JPEG, is too large (a decompression bomb), or has more than 8 bits per channel.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise BadImage(f"an image of {len(data)} bytes; at most {MAX_IMAGE_BYTES} are allowed")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_IMAGE_PIXELS:
            raise BadImage(f"an image of {width} x {height} pixels; at most {MAX_IMAGE_PIXELS} in all are allowed")
        if draft:
            image.draft(None, (max(1, width // 8), max(1, height // 8)))
        image.load()
        upright = image if draft else ImageOps.exif_transpose(image)
    except BadImage:
        raise
    except Exception as error:  # Pillow passes on any error of its decoders: OSError, SyntaxError, struct.error, EOFError, ...
        known = not isinstance(error, UnidentifiedImageError)  # its message is the address of a buffer in memory
        reason = " ".join(str(error).split())[:120] if known else "neither PNG nor JPEG"
        raise BadImage(f"not a readable image ({reason}); a whole PNG or JPEG file is allowed") from error
    if upright.mode not in MODES:
        raise BadImage(f"an image of mode {upright.mode}; 8 bits per channel (grey, palette, RGB, with or without alpha) are allowed")
    return upright


@dataclass(frozen=True)
class ImageSteps:
    """The steps of preprocessor_config.json, ready to apply to images."""

    height: int
    """Height after resizing, in pixels; 0 if `shortest_edge` applies or if there is no resizing."""
    width: int
    """Width after resizing, in pixels; 0 as for `height`."""
    shortest_edge: int
    """Length of the shorter side after resizing with the aspect ratio preserved; 0 for a fixed size."""
    resample: int
    """Pillow's number for the resampling filter."""
    crop: tuple[int, int] | None
    """(height, width) of the centre crop, or None."""
    on_white: bool
    """Whether to composite transparent images on white (do_convert_rgb); otherwise alpha is dropped."""
    table: np.ndarray
    """float32 [C, 256]: the normalized value for each 8-bit value and channel."""

    @classmethod
    def build(cls, image: Mapping[str, Any]) -> ImageSteps:
        """Builds the steps from an "image" map: the keys of preprocessor_config.json with defaults filled in, and `num_channels`.

        Raises:
            BadImage: The map requires a step that this file does not support, or has an invalid value.
        """
        try:
            return cls._built(image)
        except BadImage:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadImage(f"preprocessor settings that cannot be used ({' '.join(str(error).split())[:120]})") from error

    @classmethod
    def _built(cls, image: Mapping[str, Any]) -> ImageSteps:
        size = dict(image["size"]) if image["do_resize"] else {}
        if sorted(size) not in ([], ["height", "width"], ["shortest_edge"]):
            raise BadImage(f"preprocessor size {size}; {{height, width}} or {{shortest_edge}} is allowed")
        crop = (int(image["crop_size"]["height"]), int(image["crop_size"]["width"])) if image.get("do_center_crop") else None
        height, width, edge = (int(size.get(key, 0)) for key in ("height", "width", "shortest_edge"))
        for pixels in (*size.values(), *(crop or ())):
            if not 1 <= int(pixels) <= MAX_EDGE:
                raise BadImage(f"preprocessor size of {int(pixels)} pixels; 1 to {MAX_EDGE} are allowed")
        resample = Image.Resampling(2 if image.get("resample") is None else int(image["resample"]))
        return cls(height, width, edge, int(resample), crop, bool(image.get("do_convert_rgb")), _table(image))

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """(channels, height, width) of every output; None if it depends on the image."""
        size = self.crop or ((self.height, self.width) if self.height else None)
        return (len(self.table), *size) if size else None

    def __call__(self, data: bytes) -> np.ndarray:
        """Returns float32 [C, H, W] for one encoded image."""
        image = self._convert(decode_image(data))
        if self.height or self.shortest_edge:
            size = (self.width, self.height) if self.height else _edge_size(image.size, self.shortest_edge)
            if size[0] * size[1] > MAX_IMAGE_PIXELS:
                raise BadImage(
                    f"an image of {image.width} x {image.height} pixels is too narrow: resizing would make it {size[0]} x {size[1]}"
                )
            image = image.resize(size, resample=Image.Resampling(self.resample))
        pixels = np.asarray(image, dtype=np.uint8)
        pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        if self.crop:
            pixels = _center_crop(pixels, *self.crop)
        return np.stack([row[channel] for row, channel in zip(self.table, pixels, strict=True)])

    def _convert(self, image: Image.Image) -> Image.Image:
        transparent = "A" in image.getbands() or image.info.get("transparency") is not None
        if self.on_white and transparent:
            layer = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", layer.size, (255, 255, 255, 255)), layer)
        return image.convert("L" if len(self.table) == 1 else "RGB")


def _table(image: Mapping[str, Any]) -> np.ndarray:
    """Returns float32 [C, 256], rounding like the Transformers processor: rescale in float64, round to float32, normalize in float32."""
    channels = int(image["num_channels"])
    if channels not in (1, 3):
        raise BadImage(f"a model of {channels} channels; 1 (grey) or 3 (RGB) are allowed")
    values = np.arange(256, dtype=np.float64)
    factor = float(image["rescale_factor"]) if image["do_rescale"] else 1.0
    if not abs(factor) <= LARGEST_FACTOR:
        raise BadImage(f"preprocessor rescale_factor is {factor:g}; at most {LARGEST_FACTOR:g} is allowed")
    scaled = (values * factor).astype(np.float32)
    table = np.repeat(scaled[None], channels, axis=0)
    if image["do_normalize"]:
        mean, std = (_per_channel(image[key], key, channels) for key in ("image_mean", "image_std"))
        if not std.all():
            raise BadImage("preprocessor image_std is 0; other numbers are allowed")
        table = (table - mean[:, None]) / std[:, None]
    if not np.isfinite(table).all():
        raise BadImage("preprocessor image_mean, image_std or rescale_factor are too large or too small")
    return table


def _per_channel(value: Any, key: str, channels: int) -> np.ndarray:
    values = np.array(value if isinstance(value, Sequence) else [value] * channels, dtype=np.float32)
    if values.shape != (channels,) or not np.isfinite(values).all():
        raise BadImage(
            f"preprocessor {key} has the values {values.tolist()!s:.60}; {channels} finite numbers, one per channel, are allowed"
        )
    return values


def _edge_size(size: tuple[int, int], edge: int) -> tuple[int, int]:
    width, height = size
    long = int(edge * max(size) / min(size))
    return (edge, long) if width <= height else (long, edge)


def _center_crop(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Crops the centre of uint8 [C, H, W]; pads smaller images with zeros first, an odd extra row or column at the top or left."""
    lacking = [max(0, height - pixels.shape[1]), max(0, width - pixels.shape[2])]
    top, left = ((pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2)
    if any(lacking):
        before = [(gap + 1) // 2 for gap in lacking]
        pixels = np.pad(pixels, [(0, 0)] + [(first, gap - first) for first, gap in zip(before, lacking, strict=True)])
        top, left = top + before[0], left + before[1]
    return pixels[:, top : top + height, left : left + width]
