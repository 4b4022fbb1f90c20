"""Runs an encoder-decoder from two OpenVINO graphs, for groups of sources at a time. Needs numpy and openvino; it is copied to servers.

The graphs come from `export.generation.encoder_decoder_graphs`. A group is encoded once and then decoded token by token; all of its
texts have equally many tokens. Finished texts leave it, and a text may branch into several continuations (`decoding_rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray

from .decoding_rules import Logits
from .openvino_request import Request, for_this_cpu

ENCODER, DECODER = "encoder.xml", "decoder.xml"


class EncoderDecoder:
    """Two compiled graphs.

    Args:
        folder: Holds encoder.xml and decoder.xml.
        properties: Settings to compile them with.
        pad_token_id: What shorter sources are filled up with; the mask hides it.
    """

    def __init__(self, folder: Path, properties: Mapping[str, str], pad_token_id: int) -> None:
        core = openvino.Core()
        settings = for_this_cpu(core, properties)
        self.encoder, self.decoder = (core.compile_model(str(folder / name), "CPU", settings) for name in (ENCODER, DECODER))
        self._pad_token_id = pad_token_id
        self._read_names = frozenset(name for port in self.decoder.inputs for name in port.names)
        self._encoding = Request(self.encoder)
        self._free: list[Request] = []

    def begin(self, sources: Sequence[NDArray[np.int32]]) -> Group:
        """Encodes sources, token ids int32 [length] each."""
        width = max(len(source) for source in sources)
        ids = np.full((len(sources), width), self._pad_token_id, np.int64)
        mask = np.zeros_like(ids)
        for row, source in enumerate(sources):
            ids[row, : len(source)], mask[row, : len(source)] = source, 1
        self._encoding.infer({"input_ids": ids, "attention_mask": mask})
        read = {name: values for name, values in self._encoding.outputs().items() if name in self._read_names}
        read["attention_mask"] = mask
        return Group(self._free.pop() if self._free else Request(self.decoder), read, self._free.append)


class Group:
    """Texts that are written together; a context manager, which gives its request back.

    Args:
        request: Request of the decoder.
        read: What the decoder reads of the sources, by its names, [n, ...] each: keys, values and their mask.
        give_back: Takes the request back.
    """

    def __init__(self, request: Request, read: Mapping[str, NDArray[Any]], give_back: Callable[[Request], None]) -> None:
        self._request, self._read, self._give_back = request, dict(read), give_back
        self._rows = len(self._read["attention_mask"])
        request.reset_state()
        request.bind(self._read)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back(self._request)

    def step(self, tokens: NDArray[np.int64], order: NDArray[np.int32]) -> Logits:
        """Appends tokens [r] to the texts with the numbers `order` [r] of the step before; returns the logits of the next ones [r, V]."""
        return self.forward(tokens[:, None], order)[:, -1]

    def forward(self, tokens: NDArray[np.int64], order: NDArray[np.int32]) -> Logits:
        """Like `step`, for several tokens [r, n] at once; returns the logits after each, [r, n, V]."""
        if not np.array_equal(order, np.arange(self._rows)):
            self._rows = len(order)
            self._read = {name: values[order] for name, values in self._read.items()}
            self._request.bind(self._read)
        return self._request.infer({"input_ids": tokens, "beam_idx": order})
