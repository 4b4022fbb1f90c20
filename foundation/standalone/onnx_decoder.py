"""Runs a decoder from an ONNX graph with keys and values in buffers of this module. Needs numpy and onnxruntime; it is copied to servers.

    input_ids    int64 [b, n]    the new tokens; shorter prompts are filled up after
    seqlens_k    int32 [b]       tokens of each text after this step, less 1
    total        int32 []        tokens of the longest text after this step
    kept         int64 [k]       places in the b n new tokens whose logits are asked
    logits       float32 [k, V]
    past_key_values.<layer>.key, .value    float32 [b, heads, room, head size], written in place as present.<layer>.key, .value

The graph comes from `export.generation.fused_graph`. Keys and values of all texts are in one buffer for each layer, a row for each text,
with room for more tokens than there are: a step writes after the last token of each row, and nothing is copied. Texts of other lengths
take a step together, so that they come and go as they like (continuous batching). Short prompts are read together, a long one in parts.

The sum of a product is added up in another order for one row than for several, and for the last of an odd number of rows: an answer may
depend on its company. With the property `INVARIANT` it does not: a prompt is read by itself, and a step always has an even number of rows,
with one of no text before the others where it takes one. Then every row is added up alike (tests/export/engines/test_batch_invariant.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from .decoding_rules import Logits

PART = 256
"""Tokens that are read at once: of one prompt, or of short ones with what fills them up."""
ROOM = 256
"""Tokens that a buffer has room for at first; it doubles."""
CACHE, WRITTEN = "past_key_values.", "present."
"""Prefixes of the buffers' names, as inputs and as outputs."""
INVARIANT = "batch_invariant"
"""Property, "1" or absent: whether the logits of a text do not depend on the texts that are written with it."""
CONTEXT = "context"
"""Inputs of the graph that limit the length of a text."""
Ids = Sequence[int] | NDArray[np.integer[Any]]


class OnnxDecoder:
    """An open graph.

    Args:
        path: The ONNX file.
        properties: Settings of the session: its attributes, and entries of its configuration, whose names have dots.
    """

    def __init__(self, path: Path, properties: Mapping[str, str]) -> None:
        self.session = onnxruntime.InferenceSession(str(path), session_options(properties), providers=["CPUExecutionProvider"])
        self.invariant = properties.get(INVARIANT) == "1"
        """Whether logits of a text do not depend on its company."""
        self.buffers = {one.name: (int(one.shape[1]), int(one.shape[3])) for one in self.session.get_inputs() if one.name.startswith(CACHE)}
        """Heads and head size of each buffer, by the name of the input."""
        self.context = int(self.session.get_modelmeta().custom_metadata_map[CONTEXT])
        """Most tokens of a text."""
        self.vocabulary = int(next(one for one in self.session.get_outputs() if one.name == "logits").shape[1])

    @property
    def part(self) -> int:
        """Most tokens of a prompt that are read at once."""
        return PART

    def texts(self) -> Texts:
        """Returns a cache without a text."""
        return Texts(self)

    def beams(self, before: Sequence[int]) -> Beams:
        """Returns the beams of a search behind these tokens, in a cache of their own."""
        return Beams(self, before)

    def groups(self, prompts: Sequence[NDArray[np.int64]]) -> Iterator[Sequence[NDArray[np.int64]]]:
        """Yields prompts that are read together, in their order; see `together`."""
        return together(prompts)


def session_options(properties: Mapping[str, str]) -> Any:
    """Returns the options of a session with these settings; `INVARIANT` is none of them."""
    options = onnxruntime.SessionOptions()
    for name, value in properties.items():
        if name == INVARIANT:
            continue
        if "." in name:
            options.add_session_config_entry(name, value)
        else:
            setattr(options, name, int(value))
    options.log_severity_level = 3  # it warns that a saved optimized graph fits this machine only: that is what it is for
    return options


@dataclass(frozen=True)
class _Bound:
    """Arrays that are bound to the graph."""

    key: tuple[int, ...]
    """What they are bound for: rows, shapes and room."""
    binding: Any
    inputs: dict[str, NDArray[Any]]
    """All inputs but the buffers of keys and values; written before each call."""


class Texts:
    """Texts that are written together; row i of the cache holds what the model has read of text i."""

    def __init__(self, decoder: OnnxDecoder) -> None:
        self._decoder = decoder
        self.lengths: list[int] = []
        """Tokens that have been read of each text."""
        self._room = (0, 0)
        self._before = int(decoder.invariant)
        """Rows of the buffers before those of the texts."""
        self._buffers: dict[str, NDArray[np.float32]] = {}
        self._bound: _Bound | None = None

    def read(self, prompts: Sequence[Ids]) -> Logits:
        """Adds texts after the others; returns the logits of the next token of each, float32 [m, V].

        Args:
            prompts: Token ids, at least one each.
        """
        given = [np.asarray(one, np.int64) for one in prompts]
        groups: Iterable[Sequence[NDArray[np.int64]]] = ([one] for one in given) if self._before else together(given)
        return np.concatenate([self._read(group) for group in groups])

    def extend(self, row: int, ids: Ids) -> Logits:
        """Appends tokens to one text, at most `PART`; returns the logits of the next one, float32 [V]. A text after the last is new."""
        if row == len(self.lengths):
            self.lengths.append(0)
        part = np.asarray(ids, np.int64)[None]
        logits: Logits = self._run(part, row, [part.shape[1]], [part.shape[1] - 1])[0]
        return logits

    def step(self, tokens: NDArray[np.int64]) -> Logits:
        """Appends one token to each of the first r texts; returns the logits of the next ones, float32 [r, V]."""
        return self._run(tokens[:, None], 0, [1] * len(tokens), range(len(tokens)), self._before * (len(tokens) % 2))

    def forward(self, tokens: NDArray[np.int64], out: Logits | None = None) -> Logits:
        """Appends tokens to all texts, which have equally many; to b new texts where there are none.

        Args:
            tokens: Token ids [b, n].
            out: Where the logits go, float32 [b, n, V]; default: a new array.

        Returns:
            The logits [b, n, V].
        """
        rows, count = tokens.shape
        logits: Logits = np.empty((rows, count, self._decoder.vocabulary), np.float32) if out is None else out
        if not self.lengths:
            self.lengths = [0] * rows
            logits[...] = self._run(tokens, 0, [count] * rows, range(rows * count)).reshape(logits.shape)
            return logits
        # after other tokens, the attention of ONNX Runtime takes several tokens only of one text
        for row in range(rows):
            logits[row] = self._run(tokens[row : row + 1], row, [count], range(count))
        return logits

    def keep(self, order: Sequence[int] | NDArray[np.int32]) -> None:
        """Reorders the texts: text i becomes text order[i]. A text that is missing is dropped, a text that occurs twice is duplicated."""
        moved = [(row, source) for row, source in enumerate(order) if row != source]
        lengths = [self.lengths[source] for source in order]
        self._grow(len(lengths), max(lengths, default=0))
        if moved:
            rows, sources = (list(side) for side in zip(*moved, strict=True))
            longest = max(self.lengths[source] for source in sources)
            for buffer in (whole[self._before :] for whole in self._buffers.values()):
                buffer[rows, :, :longest] = buffer[sources, :, :longest]
        self.lengths = lengths

    def _read(self, prompts: Sequence[NDArray[np.int64]]) -> Logits:
        """Reads prompts that fit into one part, or a single one in several."""
        first = len(self.lengths)
        if len(prompts) == 1:
            (prompt,) = prompts
            return np.stack([self.extend(first, prompt[start : start + PART]) for start in range(0, len(prompt), PART)])[-1:]
        counts = [len(prompt) for prompt in prompts]
        tokens = np.zeros((len(prompts), max(counts)), np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        self.lengths += [0] * len(prompts)
        return self._run(tokens, first, counts, [row * tokens.shape[1] + count - 1 for row, count in enumerate(counts)])

    def _run(self, tokens: NDArray[np.int64], first: int, counts: Sequence[int], places: Sequence[int], extra: int = 0) -> Logits:
        """Appends the first counts[i] tokens of row i [b, n] to the texts from `first` on; returns the logits at the places `places`.

        Args:
            tokens: Token ids.
            first: The first text.
            counts: Tokens of each text.
            places: Places in the b n tokens.
            extra: Rows of no text that are computed before the others: 1 needs a row before that of text `first`.
        """
        rows = slice(first, first + len(counts))
        after = [length + count for length, count in zip(self.lengths[rows], counts, strict=True)]
        self._grow(len(self.lengths), max(length + tokens.shape[1] for length in self.lengths[rows]))
        if extra:
            tokens = np.concatenate([np.zeros((extra, tokens.shape[1]), np.int64), tokens])
            places = [*range(extra), *(extra * tokens.shape[1] + place for place in places)]
        lengths = [*[tokens.shape[1]] * extra, *after]
        logits = np.empty((len(places), self._decoder.vocabulary), np.float32)
        bound = self._bound_to(slice(self._before + first - extra, self._before + rows.stop), tokens.shape, len(places))
        for name, values in (("input_ids", tokens), ("seqlens_k", np.array(lengths) - 1), ("total", max(lengths)), ("kept", places)):
            bound.inputs[name][...] = values
        bound.binding.bind_output("logits", "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
        self._decoder.session.run_with_iobinding(bound.binding)
        self.lengths[rows] = after
        return logits[extra:]

    def _bound_to(self, rows: slice, shape: tuple[int, ...], asked: int) -> _Bound:
        """Returns the buffers of these texts bound to the graph, and its other inputs: those of the call before if they fit,
        as in one step after the other.
        """
        key = (rows.start, rows.stop, *shape, asked, *self._room)
        if self._bound is not None and self._bound.key == key:
            return self._bound
        binding = self._decoder.session.io_binding()
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.zeros(shape, np.int64),
            "seqlens_k": np.zeros(shape[0], np.int32),
            "total": np.zeros((), np.int32),
            "kept": np.zeros(asked, np.int64),
        }
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, buffer in self._buffers.items():
            part = buffer[rows]
            where = ("cpu", 0, part.dtype, part.shape, part.ctypes.data)
            binding.bind_input(name, *where)
            binding.bind_output(name.replace(CACHE, WRITTEN, 1), *where)
        self._bound = _Bound(key, binding, inputs)
        return self._bound

    def _grow(self, rows: int, tokens: int) -> None:
        """Makes room for so many texts of so many tokens; what was read stays."""
        room = _doubled(self._room[0], rows, 1), _doubled(self._room[1], tokens, ROOM)
        if room == self._room:
            return
        for name, (heads, size) in self._decoder.buffers.items():
            grown = np.zeros((self._before + room[0], heads, room[1], size), np.float32)
            if name in self._buffers:
                grown[: self._before + self._room[0], :, : self._room[1]] = self._buffers[name]
            self._buffers[name] = grown
        self._room = room


class Beams:
    """The beams of one search in a cache of their own, as `decoding_rules.search` steps them.

    Args:
        decoder: The model.
        before: What it reads before the start of the search.
    """

    def __init__(self, decoder: OnnxDecoder, before: Sequence[int]) -> None:
        self._texts, self._begun = decoder.texts(), False
        self._unread = np.asarray(before, np.int64)
        if not before:
            self._texts.lengths.append(0)

    def read(self) -> bool:
        """Reads the next part of what comes before the start, at most `PART` tokens; returns whether all has been read."""
        part, self._unread = self._unread[:PART], self._unread[PART:]
        if len(part):
            self._texts.extend(0, part)
        return not len(self._unread)

    def step(self, tokens: NDArray[np.int64], order: NDArray[np.int32]) -> Logits:
        """Appends tokens [r] to the texts with the numbers `order` [r] of the step before; returns the logits of the next ones [r, V].

        The first step reads what `read` has left.
        """
        while not self._begun and not self.read():
            continue
        self._texts.keep(order if self._begun else np.zeros_like(order))  # at first all beams continue the prompt
        self._begun = True
        return self._texts.step(tokens)

    def close(self) -> None:
        """Nothing is shared."""


def together(prompts: Sequence[NDArray[np.int64]]) -> Iterator[Sequence[NDArray[np.int64]]]:
    """Yields prompts that are read together, in their order: as many as have at most `PART` tokens when filled up, or a single one."""
    group: list[NDArray[np.int64]] = []
    for prompt in prompts:
        if group and (1 + len(group)) * max(len(one) for one in (*group, prompt)) > PART:
            yield group
            group = []
        group.append(prompt)
    if group:
        yield group


def _doubled(size: int, wanted: int, smallest: int) -> int:
    """Returns a size, doubled until it is as large as wanted."""
    return next(one for one in (max(size, smallest) << times for times in itertools.count()) if one >= wanted)
