"""Preprocessing: turns rows (texts, pairs of texts, encoded images or sounds) into model inputs.

This file prepares rows for training, for every engine, and inside the Triton server, where it is copied next to the model, for
sounds with `sound.py` beside it. It therefore needs only numpy (1 or 2), tokenizers and Pillow.

Text is tokenized by `tokenizer.json`, truncated to `max_length` (pairs: longest first) and padded to the smallest bucket that fits the
longest row. Blocks of token ids (text-generation) are only padded, on the right, which causal attention never reads. Pairs of token ids
(text-to-text) are padded to one length: the source for the encoder, with its mask, and for the decoder the target behind the start token.
Images are decoded by Pillow, rotated upright by their EXIF tag, and converted, resized and cropped as the model's preprocessor_config.json
says. Rescaling and normalizing an 8-bit value v of channel c

    x = (float32(v * rescale_factor) - mean_c) / std_c

has only 256 possible results per channel, so it is a table look-up, precomputed with the same rounding as the Transformers processor.

Not supported: left padding, images with more than 8 bits per channel, and image processors with extra steps (crop_pct, reordered
channels, patches); callers reject those.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from tokenizers import Tokenizer

SCHEMA = 1
PREPROCESS = "preprocess.json"
TOKENIZER = "tokenizer.json"
LOGIT_BYTES = 2**28
FORMATS = ("PNG", "JPEG")
MAX_IMAGE_BYTES = 64 * 2**20
MAX_IMAGE_PIXELS = 64 * 10**6
MAX_EDGE = 2**14
LARGEST_FACTOR = 1e6
MODES = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"})

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids")
"""What a text can be to a model, all int64 [n, L]."""


@dataclass(frozen=True, eq=False)
class TokenPair:
    """A text and the text that a model is to answer with, as token ids."""

    source: NDArray[np.int32]
    """What the encoder reads, int32 [S]."""
    target: NDArray[np.int32]
    """What the decoder is to write, int32 [T], the end token last."""

    def __len__(self) -> int:
        """Returns the length that the pair is padded to at least; the decoder reads a start token before the target."""
        return max(len(self.source), len(self.target) + 1)


class OfTokens(Sized, Protocol):
    """A row that knows its tokens: a window of a text (`windows.Window`)."""

    @staticmethod
    def tokens(rows: Sequence[Any], tokenizer: Any) -> list[NDArray[np.int32]]:
        """Returns the values of `INPUTS` of some rows, int32 [4, L] each."""


Row = str | tuple[str, str] | bytes | NDArray[np.int32] | TokenPair | OfTokens
"""A text, a pair of texts, an encoded image or sound, a block of token ids [L], a pair of such, or a window of a context."""


class BadRow(ValueError):
    """A row cannot be prepared; the message says in one line which row, what was given, and what is allowed."""


def _sounds(values: Mapping[str, Any], *settings: Any) -> Any:
    """Returns what prepares sounds, from the file beside this one: in the package, or alone in a served model."""
    beside = importlib.import_module(f"{__package__}.sound" if __package__ else "sound")
    return beside.Sounds(beside.SoundSteps.build(values), *settings)


def decode_image(data: bytes, draft: bool = False) -> Image.Image:
    """Decodes a PNG or JPEG image and turns it upright.

    Args:
        data: The encoded file.
        draft: Decode a JPEG at an eighth of its size, without rotating it: a quick check that the file is complete.

    Raises:
        BadRow: The data is not a complete PNG or JPEG, is too large (a decompression bomb), or has more than 8 bits per channel.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise BadRow(f"an image of {len(data)} bytes; at most {MAX_IMAGE_BYTES} are allowed")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MAX_IMAGE_PIXELS:
            raise BadRow(f"an image of {width} x {height} pixels; at most {MAX_IMAGE_PIXELS} in all are allowed")
        if draft:
            image.draft(None, (max(1, width // 8), max(1, height // 8)))
        image.load()
        upright = image if draft else ImageOps.exif_transpose(image)
    except BadRow:
        raise
    except Exception as error:  # Pillow passes on any error of its decoders: OSError, SyntaxError, struct.error, EOFError, ...
        known = not isinstance(error, UnidentifiedImageError)  # its message is the address of a buffer in memory
        reason = " ".join(str(error).split())[:120] if known else "neither PNG nor JPEG"
        raise BadRow(f"not a readable image ({reason}); a whole PNG or JPEG file is allowed") from error
    if upright.mode not in MODES:
        raise BadRow(f"an image of mode {upright.mode}; 8 bits per channel (grey, palette, RGB, with or without alpha) are allowed")
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
            BadRow: The map requires a step that this file does not support, or has a value that is none.
        """
        try:
            return cls._built(image)
        except BadRow:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadRow(f"preprocessor settings that cannot be used ({' '.join(str(error).split())[:120]})") from error

    @classmethod
    def _built(cls, image: Mapping[str, Any]) -> ImageSteps:
        size = dict(image["size"]) if image["do_resize"] else {}
        if sorted(size) not in ([], ["height", "width"], ["shortest_edge"]):
            raise BadRow(f"preprocessor size {size}; {{height, width}} or {{shortest_edge}} is allowed")
        crop = (int(image["crop_size"]["height"]), int(image["crop_size"]["width"])) if image.get("do_center_crop") else None
        height, width, edge = (int(size.get(key, 0)) for key in ("height", "width", "shortest_edge"))
        for pixels in (*size.values(), *(crop or ())):
            if not 1 <= int(pixels) <= MAX_EDGE:
                raise BadRow(f"preprocessor size of {int(pixels)} pixels; 1 to {MAX_EDGE} are allowed")
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
                raise BadRow(
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
        raise BadRow(f"a model of {channels} channels; 1 (grey) or 3 (RGB) are allowed")
    values = np.arange(256, dtype=np.float64)
    factor = float(image["rescale_factor"]) if image["do_rescale"] else 1.0
    if not abs(factor) <= LARGEST_FACTOR:
        raise BadRow(f"preprocessor rescale_factor is {factor:g}; at most {LARGEST_FACTOR:g} is allowed")
    scaled = (values * factor).astype(np.float32)
    table = np.repeat(scaled[None], channels, axis=0)
    if image["do_normalize"]:
        mean, std = (_per_channel(image[key], key, channels) for key in ("image_mean", "image_std"))
        if not std.all():
            raise BadRow("preprocessor image_std is 0; other numbers are allowed")
        table = (table - mean[:, None]) / std[:, None]
    if not np.isfinite(table).all():
        raise BadRow("preprocessor image_mean, image_std or rescale_factor are too large or too small")
    return table


def _per_channel(value: Any, key: str, channels: int) -> np.ndarray:
    values = np.array(value if isinstance(value, Sequence) else [value] * channels, dtype=np.float32)
    if values.shape != (channels,) or not np.isfinite(values).all():
        raise BadRow(f"preprocessor {key} has the values {values.tolist()!s:.60}; {channels} finite numbers, one per channel, are allowed")
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


@dataclass(frozen=True)
class Preprocessor:
    """Prepares rows for one checkpoint; immutable and safe to share between threads."""

    modality: str
    """"text", "image" or "audio"."""
    input_names: tuple[str, ...]
    """Names of the model's inputs, in the order of its graph."""
    labels: tuple[str, ...]
    """Class names by id; the single name of the value for regression; empty for generation."""
    task: str
    """What the model was made for, as the recipe names it."""
    max_length: int = 0
    """Maximum tokens, or samples of a waveform, per row; longer rows are truncated. 0 for images and spectrograms."""
    buckets: tuple[int, ...] = ()
    """Lengths that rows are padded to, ascending; the last is max_length. () for images and spectrograms."""
    pad_token_id: int = 0
    """Padding value of input_ids."""
    pad_token_type_id: int = 0
    """Padding value of token_type_ids."""
    decoder_start_token_id: int | None = None
    """What a decoder reads before its first token; None for models without a decoder beside the encoder."""
    prompt: str = ""
    """Text that is put before each text."""
    dimensions: int = 0
    """Numbers of the vector that the model answers a text with; 0 for models that answer otherwise."""
    response: str = "label"
    """Form of what the server returns, a name in `response.RESPONSES`; not used for generation."""
    stride: int = 0
    """Tokens of a context that two windows share, where it is longer than the model reads."""
    null_threshold: float | None = None
    """Above which lead of the score of no answer, over that of the best answer, there is none; None: there always is one."""
    image: Mapping[str, Any] | None = None
    """preprocessor_config.json with defaults filled in, and `num_channels`; None for other rows."""
    sound: Mapping[str, Any] | None = None
    """What makes a `SoundSteps`; None for other rows."""
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    """The tokenizer, set to truncate to max_length and not to pad; None for images and sounds."""
    steps: ImageSteps | None = field(default=None, init=False, repr=False, compare=False)
    """The image steps, derived from `image`."""
    sounds: Any = field(default=None, init=False, repr=False, compare=False)
    """What prepares sounds, a `compress.standalone.sound.Sounds`, derived from `sound`."""

    def __post_init__(self) -> None:
        if self.sound is not None:
            object.__setattr__(self, "sounds", _sounds(self.sound, self.input_names, self.max_length, self.buckets))
        if self.image is not None:
            object.__setattr__(self, "steps", ImageSteps.build(self.image))
        if self.tokenizer is not None:
            # Set only here: changing a tokenizer while another thread encodes with it would be a race.
            self.tokenizer.no_padding()
            self.tokenizer.enable_truncation(self.max_length, strategy="longest_first")
            if self.finds_spans:  # contexts are divided, not truncated
                self.tokenizer.no_truncation()

    @property
    def generates(self) -> bool:
        """Whether the model predicts the next token: rows are blocks or pairs of token ids, and there are no labels."""
        return not self.labels

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of every row where all have one: (channels, height, width), or (frames, filters); None where rows have lengths."""
        steps = self.steps if self.sounds is None else self.sounds.steps
        return None if steps is None else steps.shape

    @property
    def per_token(self) -> bool:
        """Whether the model has logits for every token of a row."""
        return self.generates or self.finds_spans or self.response.startswith("entities")

    @property
    def finds_spans(self) -> bool:
        """Whether rows are questions with windows of their contexts."""
        return self.response == "span"

    @property
    def width(self) -> int:
        """Numbers that the model answers a row with: a logit for each label, or a vector; 0 for generation."""
        return self.dimensions or len(self.labels)

    @classmethod
    def load(cls, folder: Path) -> Preprocessor:
        """Reads preprocess.json and, for text, tokenizer.json."""
        values = json.loads((folder / PREPROCESS).read_text(encoding="utf-8"))
        if values.pop("schema") != SCHEMA:
            raise BadRow(f"{folder / PREPROCESS}: schema {SCHEMA} expected")
        for key in ("input_names", "labels", "buckets"):
            values[key] = tuple(values[key])
        values.setdefault("response", "vector" if values.get("dimensions") else "label")  # folders written before it was named
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER)) if values["modality"] == "text" else None
        return cls(**values, tokenizer=tokenizer)

    def save(self, folder: Path) -> None:
        """Writes preprocess.json and, for text, tokenizer.json; the output is deterministic."""
        values = {
            "schema": SCHEMA,
            "task": self.task,
            "modality": self.modality,
            "input_names": list(self.input_names),
            "labels": list(self.labels),
            "max_length": self.max_length,
            "buckets": list(self.buckets),
            "pad_token_id": self.pad_token_id,
            "pad_token_type_id": self.pad_token_type_id,
            "decoder_start_token_id": self.decoder_start_token_id,
            "image": dict(self.image) if self.image is not None else None,
        }
        if self.sound is not None:
            values["sound"] = dict(self.sound)
        if self.dimensions:  # other models have neither
            values |= {"prompt": self.prompt, "dimensions": self.dimensions}
        if not self.generates:
            values["response"] = self.response
        if self.finds_spans:
            values |= {"stride": self.stride, "null_threshold": self.null_threshold}
        (folder / PREPROCESS).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        if self.tokenizer is not None:
            self.tokenizer.save(str(folder / TOKENIZER))

    def encode(self, rows: Sequence[Row], length: int | None = None) -> dict[str, np.ndarray]:
        """Prepares rows as one batch.

        Args:
            rows: n rows of the model's modality.
            length: Tokens or samples to pad to; 0 pads to the longest row (training). None pads to the smallest bucket that fits
                the longest row. Ignored for images and spectrograms.

        Returns:
            Text: int64 [n, L] for each of `input_names`. Images: `{input_names[0]: float32 [n, C, H, W]}`. Sounds: see `Sounds.encode`.

        Raises:
            BadRow: A row has the wrong type or is a damaged image.
            BadSound: The same of a sound (`compress.standalone.sound`), also a ValueError.
            ValueError: A row is longer than `length`.
        """
        if self.sounds is not None:
            made: dict[str, np.ndarray] = self.sounds.encode(self.sounds.prepared(rows), length)
            return made
        if self.steps is not None:
            return {self.input_names[0]: self._images(rows)}
        return self._pad(self.tokenized(rows), length)

    def groups(self, rows: Sequence[Row]) -> dict[int, list[int]]:
        """Groups rows by the smallest bucket that fits them: bucket -> row indices, buckets ascending; `{0: all}` without lengths."""
        if self.sounds is not None:
            groups: dict[int, list[int]] = self.sounds.groups(self.sounds.prepared(rows))
            return groups
        if self.steps is not None:
            return {0: list(range(len(rows)))} if rows else {}
        return self._by_bucket(self.tokenized(rows))

    def batches(self, rows: Sequence[Row], batch_size: int) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
        """Yields (row indices, prepared batch): at most `batch_size` rows per batch, all of one bucket; every row exactly once.

        For generation, `LOGIT_BYTES` limits the rows of a batch further: the logits have an entry for every token of the vocabulary.
        """
        if self.sounds is not None:
            yield from self.sounds.batches(rows, batch_size)
            return
        tokens = self.tokenized(rows) if self.steps is None else None
        groups = self.groups(rows) if tokens is None else self._by_bucket(tokens)
        for bucket, members in groups.items():
            size = self._max_rows(bucket, batch_size)
            for start in range(0, len(members), size):
                indices = members[start : start + size]
                if tokens is None:
                    yield indices, self.encode([rows[i] for i in indices])
                else:
                    yield indices, self._pad([tokens[i] for i in indices], bucket)

    def _max_rows(self, bucket: int, batch_size: int) -> int:
        if not self.generates:
            return batch_size
        assert self.tokenizer is not None, "a text preprocessor has a tokenizer"
        return max(1, min(batch_size, LOGIT_BYTES // (4 * bucket * self.tokenizer.get_vocab_size())))

    @property
    def padding(self) -> dict[str, int]:
        """The padding value of each of `INPUTS`."""
        return dict(zip(INPUTS, (self.pad_token_id, 0, self.pad_token_type_id, self.pad_token_id), strict=True))

    def tokenized(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Returns int32 [4, length] per row, truncated but not padded: the values of `INPUTS`.

        Raises:
            BadRow: A row has the wrong type or too many tokens.
        """
        if self.decoder_start_token_id is not None:
            return [self._pair(index, row, self.decoder_start_token_id) for index, row in enumerate(rows)]
        if self.generates:
            return [_inputs(_block(index, row, self.max_length)) for index, row in enumerate(rows)]
        if self.finds_spans:
            return _own_tokens(rows, self.tokenizer)
        for index, row in enumerate(rows):
            _check_text(index, row)
            if self.dimensions and not isinstance(row, str):
                raise BadRow(f"row {index}: {type(row).__name__} given; a single text is allowed")
        assert self.tokenizer is not None, "a text preprocessor has a tokenizer"
        texts = [self.prompt + str(row) for row in rows] if self.prompt else list(rows)
        return [_inputs(row.ids, row.type_ids) for row in self.tokenizer.encode_batch_fast(texts)]

    def _pair(self, index: int, row: Row, start: int) -> NDArray[np.int32]:
        """Returns the inputs of a pair, source and target padded to the longer of the two."""
        if not isinstance(row, TokenPair) or not (len(row.source) >= 1 and len(row.target) >= 1 and len(row) <= self.max_length):
            given = f"{len(row.source)} and {len(row.target)} tokens" if isinstance(row, TokenPair) else type(row).__name__
            allowed = f"a pair of 1 to {self.max_length} and 1 to {self.max_length - 1} token ids, int32, is allowed"
            raise BadRow(f"row {index}: {given} given; {allowed}")
        made = _inputs(np.full(len(row), self.pad_token_id, np.int32))
        ids, mask, _, decoder = made
        ids[: len(row.source)], mask[len(row.source) :] = row.source, 0
        decoder[:] = self.pad_token_id
        decoder[0], decoder[1 : len(row.target) + 1] = start, row.target
        return made

    def _by_bucket(self, tokens: Sequence[np.ndarray]) -> dict[int, list[int]]:
        lengths = np.array([row.shape[1] for row in tokens], dtype=np.int64)
        buckets = np.array(self.buckets)[np.searchsorted(self.buckets, lengths)]
        return {bucket: np.flatnonzero(buckets == bucket).tolist() for bucket in self.buckets if (buckets == bucket).any()}

    def _pad(self, tokens: Sequence[np.ndarray], length: int | None) -> dict[str, np.ndarray]:
        longest = max((row.shape[1] for row in tokens), default=0)
        if length is None:
            length = next(bucket for bucket in self.buckets if bucket >= longest)
        elif length and longest > length:
            raise ValueError(f"a row of {longest} tokens does not fit into {length}")
        padding = self.padding
        made = {name: np.full((len(tokens), length or longest), padding[name], np.int64) for name in self.input_names}
        places = [(values, INPUTS.index(name)) for name, values in made.items()]
        for index, row in enumerate(tokens):
            for values, place in places:
                values[index, : row.shape[1]] = row[place]
        return made

    def _images(self, rows: Sequence[Row]) -> np.ndarray:
        assert self.steps is not None, "an image preprocessor has steps"
        shape = self.steps.shape
        pixels = np.empty((len(rows), *(shape or (len(self.steps.table), 0, 0))), np.float32)
        for index, row in enumerate(rows):
            one = self._image(index, row, self.steps)
            if index == 0 and shape is None:  # the images determine the size; all must have the same
                pixels = np.empty((len(rows), *one.shape), np.float32)
            if one.shape != pixels.shape[1:]:
                (_, height, width), (_, _, first_height, first_width) = one.shape, pixels.shape
                raise BadRow(f"row {index}: {width} x {height} pixels, row 0: {first_width} x {first_height}; give images of one size")
            pixels[index] = one
        return pixels

    @staticmethod
    def _image(index: int, row: Row, steps: ImageSteps) -> np.ndarray:
        if not isinstance(row, bytes):
            raise BadRow(f"row {index}: {type(row).__name__} given; the bytes of a PNG or JPEG image are allowed")
        try:
            return steps(row)
        except BadRow as error:
            raise BadRow(f"row {index}: {error}") from error


def _own_tokens(rows: Sequence[Row], tokenizer: Any) -> list[NDArray[np.int32]]:
    for index, row in enumerate(rows):
        if isinstance(row, str | tuple | bytes | np.ndarray | TokenPair):
            raise BadRow(f"row {index}: {type(row).__name__} given; a question with a window of its context is allowed")
    own: Any = rows[0] if rows else None
    return [] if own is None else list(own.tokens(rows, tokenizer))


def _inputs(ids: Sequence[int] | np.ndarray, types: Sequence[int] | None = None) -> NDArray[np.int32]:
    """Returns the values of `INPUTS` for the tokens of one text, int32 [4, L]: none is padding, and no decoder reads."""
    made = np.zeros((len(INPUTS), len(ids)), np.int32)
    made[0], made[1] = ids, 1
    if types is not None:
        made[2] = types
    return made


def _block(index: int, row: Row, max_length: int) -> NDArray[np.int32]:
    if not isinstance(row, np.ndarray) or row.dtype != np.int32 or row.ndim != 1 or not 2 <= len(row) <= max_length:
        given = f"{row.dtype} {list(row.shape)}" if isinstance(row, np.ndarray) else type(row).__name__
        raise BadRow(f"row {index}: {given} given; a block of 2 to {max_length} token ids, int32, is allowed")
    return row


def _check_text(index: int, row: Row) -> None:
    parts = row if isinstance(row, tuple) and len(row) == 2 else (row,)
    for part in parts:
        if not isinstance(part, str):
            raise BadRow(f"row {index}: {type(part).__name__} given; a text, or a pair of texts, is allowed")
        if not part.isascii():
            try:
                part.encode()
            except UnicodeEncodeError as error:
                raise BadRow(f"row {index}: a lone surrogate at character {error.start}; Unicode text is allowed") from error
