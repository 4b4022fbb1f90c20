"""Preprocessing: turns rows (texts, pairs of texts, encoded images or sounds) into model inputs.

This file prepares rows for training, for every engine, and inside the Triton server, where it is copied next to the model, for images with
`image.py`, for sounds with `sound.py` and for models with adapters with `adapted.py` next to it. It therefore needs only numpy (1 or 2) and
tokenizers.

Text is tokenized by `tokenizer.json`, truncated to `max_length` (pairs: longest first) and padded to the smallest bucket that fits the
longest row. A text without any token is read as one padding token that counts. Blocks of token ids (text-generation) are only padded, on
the right, which causal attention never reads. Pairs of token ids (text-to-text) are padded to one length: the source for the encoder, with
its mask, and for the decoder the target after the start token.
Images are prepared by `image.py`, sounds by `sound.py`. Not supported: left padding.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

SCHEMA = 1
PREPROCESS = "preprocess.json"
TOKENIZER = "tokenizer.json"
LOGIT_BYTES = 2**28
TWO_TOWERS = "two towers"
"""The modality of a model whose rows are images and texts."""

ADAPTER_IDS = "adapter_ids"
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", ADAPTER_IDS)
"""Possible inputs of a text model, all int64 [n, L]. The number of the adapter of a row is repeated for each of its tokens."""


@dataclass(frozen=True, eq=False)
class TokenPair:
    """A text and the text that a model is to answer with, as token ids."""

    source: NDArray[np.int32]
    """Input of the encoder, int32 [S]."""
    target: NDArray[np.int32]
    """Target of the decoder, int32 [T], the end token last."""

    def __len__(self) -> int:
        """Returns the length that the pair is padded to at least; the decoder reads a start token before the target."""
        return max(len(self.source), len(self.target) + 1)


class OfTokens(Sized, Protocol):
    """A row that knows its tokens: a window of a text (`windows.Window`)."""

    @staticmethod
    def tokens(rows: Sequence[Any], tokenizer: Any) -> list[NDArray[np.int32]]:
        """Returns the values of `INPUTS` of some rows, int32 [5, L] each."""


Row = str | tuple[str, str] | bytes | NDArray[np.int32] | TokenPair | OfTokens
"""A text, a pair of texts, an encoded image or sound, a block of token ids [L], a pair of such, or a window of a context."""


class BadRow(ValueError):
    """A row cannot be prepared; the message says in one line which row, what was given, and what is allowed."""


def _beside(name: str) -> Any:
    """Returns the module of that name next to this one: in the package, or in the folder of a served model."""
    if __package__:
        return importlib.import_module(f"{__package__}.{name}")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _sounds(values: Mapping[str, Any], *settings: Any) -> Any:
    """Returns the preprocessor of sounds."""
    beside = _beside("sound")
    return beside.Sounds(beside.SoundSteps.build(values), *settings)


@dataclass(frozen=True)
class Preprocessor:
    """Prepares rows for one checkpoint; immutable and safe to share between threads."""

    modality: str
    """"text", "image" or "audio", or "two towers" of a model with a tower for each."""
    input_names: tuple[str, ...]
    """Names of the model's inputs, in the order of its graph."""
    labels: tuple[str, ...]
    """Class names by id; the single name of the value for regression; empty for generation."""
    task: str
    """Task of the model, as the recipe names it."""
    max_length: int = 0
    """Maximum tokens, or samples of a waveform, per row; longer rows are truncated. 0 for images and spectrograms."""
    buckets: tuple[int, ...] = ()
    """Lengths that rows are padded to, ascending; the last is max_length. () for images and spectrograms."""
    pad_token_id: int = 0
    """Padding value of input_ids."""
    pad_token_type_id: int = 0
    """Padding value of token_type_ids."""
    decoder_start_token_id: int | None = None
    """Start token of the decoder; None for models that are not encoder-decoders."""
    prompt: str = ""
    """Text that is put before each text."""
    dimensions: int = 0
    """Dimensions of the model's vectors; 0 for models without vectors."""
    response: str = "label"
    """Form of the server's response, a name in `response.RESPONSES`; not used for generation."""
    stride: int = 0
    """Tokens that two windows of a context or text share, if it is longer than the model reads."""
    aggregate: str = ""
    """How the logits of windows are pooled: mean or max; empty where longer texts are truncated."""
    null_threshold: float | None = None
    """No-answer threshold: there is no answer where the null score exceeds the best span score by more. None: there always is one."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters of a model that has several, one of which each row names; else empty."""
    image: Mapping[str, Any] | None = None
    """preprocessor_config.json with defaults filled in, and `num_channels`; None for other rows."""
    sound: Mapping[str, Any] | None = None
    """Values of `SoundSteps`; None for other rows."""
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    """The tokenizer, set to truncate to max_length and not to pad; None for images and sounds."""
    steps: Any = field(default=None, init=False, repr=False, compare=False)
    """The image steps, a `foundation.standalone.image.ImageSteps`, derived from `image`."""
    sounds: Any = field(default=None, init=False, repr=False, compare=False)
    """Preprocessor of sounds, a `foundation.standalone.sound.Sounds`, derived from `sound`."""
    towers: Mapping[str, Preprocessor] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Preprocessors of both towers, by "image" and "text", if the model has two; else empty."""

    def __post_init__(self) -> None:
        if self.sound is not None:
            object.__setattr__(self, "sounds", _sounds(self.sound, self.input_names, self.max_length, self.buckets))
        if self.modality == TWO_TOWERS:
            image = replace(self, modality="image", input_names=self.input_names[:1], max_length=0, buckets=(), tokenizer=None)
            text = replace(self, modality="text", input_names=self.input_names[1:], image=None)
            object.__setattr__(self, "towers", {"image": image, "text": text})
            return
        if self.image is not None:
            object.__setattr__(self, "steps", _beside("image").ImageSteps.build(self.image))
        if self.tokenizer is not None:
            # Set only here: changing a tokenizer while another thread encodes with it would be a race.
            self.tokenizer.no_padding()
            shared = self.stride if self.aggregate else 0
            self.tokenizer.enable_truncation(self.max_length, stride=shared, strategy="longest_first")
            if self.finds_spans:  # contexts are divided, not truncated
                self.tokenizer.no_truncation()

    @property
    def generates(self) -> bool:
        """Whether the model predicts the next token: rows are blocks or pairs of token ids, and there are no labels."""
        return not self.labels

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of every row, if all have the same: (channels, height, width), or (frames, filters); None where rows have lengths."""
        steps = self.steps if self.sounds is None else self.sounds.steps
        return None if steps is None else steps.shape

    @property
    def per_token(self) -> bool:
        """Whether the model has logits for every token of a row, or every frame of a sound."""
        return self.generates or self.finds_spans or self.transcribes or self.response.startswith("entities")

    @property
    def transcribes(self) -> bool:
        """Whether rows are sounds that the model answers with the text that is spoken."""
        return self.response == "transcript"

    @property
    def finds_spans(self) -> bool:
        """Whether rows are questions with windows of their contexts."""
        return self.response == "span"

    def positions(self, length: int) -> int:
        """Returns the number of logit positions of a row of that length, if there are logits for every token or frame."""
        frames: int = length if self.sounds is None else self.sounds.steps.frames(length)
        return frames

    @property
    def width(self) -> int:
        """Size of the answer to a row: a logit for each label, or the dimensions of a vector; 0 for generation."""
        return self.dimensions or len(self.labels)

    @classmethod
    def load(cls, folder: Path) -> Preprocessor:
        """Reads preprocess.json and, for text, tokenizer.json."""
        values = json.loads((folder / PREPROCESS).read_text(encoding="utf-8"))
        if values.pop("schema") != SCHEMA:
            raise BadRow(f"{folder / PREPROCESS}: schema {SCHEMA} expected")
        for key in ("input_names", "labels", "buckets"):
            values[key] = tuple(values[key])
        values["adapters"] = tuple(values.get("adapters", ()))
        values.setdefault("response", "vector" if values.get("dimensions") else "label")  # folders written before it was named
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER)) if values["modality"] in ("text", TWO_TOWERS) else None
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
        if self.aggregate:
            values |= {"stride": self.stride, "aggregate": self.aggregate}
        if self.adapters:
            values["adapters"] = list(self.adapters)
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
            BadSound: The same of a sound (`foundation.standalone.sound`), also a ValueError.
            ValueError: A row is longer than `length`.
        """
        if self.towers:
            (name,) = {_tower(index, row) for index, row in enumerate(rows)} or {"text"}
            return self.towers[name].encode(rows, length)
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
        """Yields (row indices, prepared batch): at most `batch_size` rows per batch, all of one bucket; every row exactly once, or
        once for each of its windows, where texts are read in windows.

        For generation, `LOGIT_BYTES` limits the rows of a batch further: the logits have an entry for every token of the vocabulary.
        """
        if self.towers:
            for name, members in self.members(rows).items():
                for indices, features in self.towers[name].batches([rows[i] for i in members], batch_size):
                    yield [members[index] for index in indices], features
            return
        if self.sounds is not None:
            yield from self.sounds.batches(rows, batch_size)
            return
        owners, tokens = self.divided(rows) if self.steps is None else (range(len(rows)), None)
        groups = self.groups(rows) if tokens is None else self._by_bucket(tokens)
        for bucket, members in groups.items():
            size = self._max_rows(bucket, batch_size)
            for start in range(0, len(members), size):
                indices = members[start : start + size]
                if tokens is None:
                    yield indices, self.encode([rows[i] for i in indices])
                else:
                    yield [owners[i] for i in indices], self._pad([tokens[i] for i in indices], bucket)

    def members(self, rows: Sequence[Row]) -> dict[str, list[int]]:
        """Returns the indices of the rows of each tower; without rows of its own a tower is absent.

        Raises:
            BadRow: A row is neither an image nor a text.
        """
        kinds = [_tower(index, row) for index, row in enumerate(rows)]
        return {name: [index for index, kind in enumerate(kinds) if kind == name] for name in self.towers if name in kinds}

    def _max_rows(self, bucket: int, batch_size: int) -> int:
        if not self.generates:
            return batch_size
        assert self.tokenizer is not None, "a text preprocessor has a tokenizer"
        return max(1, min(batch_size, LOGIT_BYTES // (4 * bucket * self.tokenizer.get_vocab_size())))

    @property
    def padding(self) -> dict[str, int]:
        """The padding value of each of `INPUTS`."""
        return dict(zip(INPUTS, (self.pad_token_id, 0, self.pad_token_type_id, self.pad_token_id, 0), strict=True))

    def divided(self, rows: Sequence[Row]) -> tuple[Sequence[int], list[np.ndarray]]:
        """Returns the tokens of rows, or of all windows of texts that are read in windows, and the index of the row of each.

        Raises:
            BadRow: See `tokenized`.
        """
        if not self.aggregate:
            return range(len(rows)), self.tokenized(rows)
        found = [(index, part) for index, row in enumerate(self._encodings(rows)) for part in (row, *row.overflowing)]
        return [index for index, _ in found], [self._filled(_inputs(part.ids, part.type_ids)) for _, part in found]

    def tokenized(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Returns int32 [5, length] per row, truncated but not padded: the values of `INPUTS`.

        Raises:
            BadRow: A row has the wrong type or too many tokens, or names no adapter of a model that has several.
        """
        if self.decoder_start_token_id is not None:
            return [self._pair(index, row, self.decoder_start_token_id) for index, row in enumerate(rows)]
        if self.generates:
            return [_inputs(_block(index, row, self.max_length)) for index, row in enumerate(rows)]
        if self.finds_spans:
            return [self._filled(row) for row in _own_tokens(rows, self.tokenizer)]
        found = [self._filled(_inputs(row.ids, row.type_ids)) for row in self._encodings(rows)]
        if self.adapters:
            for index, (made, row) in enumerate(zip(found, rows, strict=True)):
                made[INPUTS.index(ADAPTER_IDS)] = self._adapter(index, row)
        return found

    def _adapter(self, index: int, row: Row) -> int:
        """Returns the number of the adapter of a row; raises if it names none of the model's."""
        try:
            number: int = _beside("adapted").index_of(row, self.adapters)
        except ValueError as error:
            raise BadRow(f"row {index}: {error}") from error
        return number

    def _filled(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the values of `INPUTS` of a text, int32 [5, L]; a text without a token is one padding token that is not masked.

        Attention over only masked tokens gives a different number in each engine, or NaN.
        """
        return tokens if tokens.shape[1] else _inputs([self.pad_token_id])

    def _encodings(self, rows: Sequence[Row]) -> list[Any]:
        """Returns the encodings of texts, or pairs of texts."""
        for index, row in enumerate(rows):
            _check_text(index, row)
            if self.dimensions and not isinstance(row, str):
                raise BadRow(f"row {index}: {type(row).__name__} given; a single text is allowed")
        assert self.tokenizer is not None, "a text preprocessor has a tokenizer"
        texts = [self.prompt + str(row) for row in rows] if self.prompt else list(rows)
        if len(texts) == 1:  # a batch would be handed to another thread, which has to wake up first
            pair: Any = texts[0]
            return [self.tokenizer.encode(pair) if isinstance(pair, str) else self.tokenizer.encode(*pair)]
        return list(self.tokenizer.encode_batch_fast(texts))

    def _pair(self, index: int, row: Row, start: int) -> NDArray[np.int32]:
        """Returns the inputs of a pair, source and target padded to the longer of the two."""
        if not isinstance(row, TokenPair) or not (len(row.source) >= 1 and len(row.target) >= 1 and len(row) <= self.max_length):
            given = f"{len(row.source)} and {len(row.target)} tokens" if isinstance(row, TokenPair) else type(row).__name__
            allowed = f"a pair of 1 to {self.max_length} and 1 to {self.max_length - 1} token ids, int32, is allowed"
            raise BadRow(f"row {index}: {given} given; {allowed}")
        made = _inputs(np.full(len(row), self.pad_token_id, np.int32))
        ids, mask, _, decoder, _ = made
        ids[: len(row.source)], mask[len(row.source) :] = row.source, 0
        decoder[:] = self.pad_token_id
        decoder[0], decoder[1 : len(row.target) + 1] = start, row.target
        return made

    def _by_bucket(self, tokens: Sequence[np.ndarray]) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for index, row in enumerate(tokens):
            groups.setdefault(self.buckets[bisect_left(self.buckets, row.shape[1])], []).append(index)
        return dict(sorted(groups.items()))

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
    def _image(index: int, row: Row, steps: Any) -> NDArray[np.float32]:
        if not isinstance(row, bytes):
            raise BadRow(f"row {index}: {type(row).__name__} given; the bytes of a PNG or JPEG image are allowed")
        try:
            made: NDArray[np.float32] = steps(row)
        except _beside("image").BadImage as error:
            raise BadRow(f"row {index}: {error}") from error
        return made


def _own_tokens(rows: Sequence[Row], tokenizer: Any) -> list[NDArray[np.int32]]:
    for index, row in enumerate(rows):
        if isinstance(row, str | tuple | bytes | np.ndarray | TokenPair):
            raise BadRow(f"row {index}: {type(row).__name__} given; a question with a window of its context is allowed")
    own: Any = rows[0] if rows else None
    return [] if own is None else list(own.tokens(rows, tokenizer))


def _inputs(ids: Sequence[int] | np.ndarray, types: Sequence[int] | None = None) -> NDArray[np.int32]:
    """Returns the values of `INPUTS` for the tokens of one text, int32 [5, L]: none is padding, and no decoder reads."""
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


def _tower(index: int, row: Row) -> str:
    """Returns the tower that reads a row."""
    if not isinstance(row, bytes | str):
        raise BadRow(f"row {index}: {type(row).__name__} given; a text, or the bytes of a PNG or JPEG image, is allowed")
    return "text" if isinstance(row, str) else "image"


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
