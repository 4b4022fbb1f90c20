"""The engine `torch_kernels_decoder` in the server: plan.safetensors on the GPU of its process, and one cache for all its answers. Copied
there with the modules that it imports.

    room    pages for keys and values of all texts together; by default what fits into `SHARE` of the free memory of the GPU, at most
            the longest text of the model for each answer

An answer begins only where pages are free for its prompt and for all tokens that it may get, so that none is stopped for want of memory.

Needs torch, the Triton language, safetensors and numpy. With TRITON_INTERPRET=1 the kernels run in the interpreter, on the CPU.

Left out: a long prompt read in parts, since attention to pages adds up in another order than attention within a text; beams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from export.fused.decoder.cache import SLOTS
from export.fused.decoder.runner import DecoderRunner
from export.fused.decoder.texts import Logits, Texts
from export.fused.runner import device_here
from export.kernels.launch import cdiv

PLAN = "plan.safetensors"
READ_TOKENS = 2048
"""Tokens of prompts that are read together; a longer prompt is read by itself."""
SHARE = 0.8
"""Share of the free memory of a GPU for keys and values; the rest is for what passes compute."""
Ids = NDArray[np.int64]


class KernelDecoder:
    """A plan that writes texts.

    Args:
        folder: Holds the plan.
        properties: `float_precision`: fp32 or fp16.
        ordinal: Number of the GPU; None: the current one.
        rows: Most texts at once.
        context: Most tokens of a text.
        cache_tokens: Tokens that all texts together have room for; 0: see above.

    Raises:
        InputError: The plan cannot be used.
        RuntimeError: There is no GPU, the context is longer than the model reads, or keys and values of one text have no room.
    """

    part = None
    """Most tokens of a prompt that are read at once; None: all are."""

    def __init__(
        self, folder: Path, properties: Mapping[str, str], ordinal: int | None, *, rows: int, context: int, cache_tokens: int = 0
    ) -> None:
        self._runner = DecoderRunner(folder / PLAN, device_here(ordinal), properties["float_precision"])
        plan, device = self._runner.plan, self._runner.device
        if context > plan.longest:
            raise RuntimeError(f"context: {context} tokens given; the model reads {plan.longest}")
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        each = plan.reads(torch.finfo(self._runner.dtype).bits // 8)["cache_bytes_per_token"]
        self._texts = self._runner.texts_within(room(rows, context, cache_tokens, free, each), context)
        self._pages = self._texts.cache.free_tokens // SLOTS
        self._rows, self._context = rows, context

    def prepare(self) -> None:
        """Reads prompts and takes steps of each size, one of both in the interpreter: compiles kernels, measures tiles, records steps."""
        on_gpu = self._runner.device.type == "cuda"
        lengths, counts = (powers(min(READ_TOKENS, self._context)), powers(min(self._rows, self._pages))) if on_gpu else ([1], [1])
        for length in lengths:
            self.texts().read([[0] * length])
        for count in counts if self._context > 1 else []:
            texts = self.texts()
            texts.read([[0]] * count)
            texts.step([0] * count)

    def texts(self) -> OnDevice:
        """Returns the cache without a text; texts of before are gone."""
        self._texts.clear()
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)  # raises what an earlier launch has broken for good
        return OnDevice(self._texts, self._runner)

    def groups(self, prompts: Sequence[Ids]) -> Iterator[Sequence[Ids]]:
        """Yields prompts that are read together, in their order."""
        group: list[Ids] = []
        for prompt in prompts:
            if group and sum(map(len, group)) + len(prompt) > READ_TOKENS:
                yield group
                group = []
            group.append(prompt)
        if group:
            yield group

    def fits(self, lengths: Sequence[int]) -> bool:
        """Returns whether texts of these lengths have room at once."""
        return sum(cdiv(length, SLOTS) for length in lengths) <= self._pages


class OnDevice:
    """Texts that are written on the GPU of their decoder, whichever is current in this thread.

    Args:
        texts: The texts.
        runner: Their decoder.
    """

    def __init__(self, texts: Texts, runner: DecoderRunner) -> None:
        self._texts, self._runner = texts, runner

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return self._texts.lengths

    def read(self, prompts: Sequence[Sequence[int] | Ids]) -> Logits:
        """Adds texts after the others; returns the logits of the next token of each, float32 [m, V]."""
        with self._there():
            return self._texts.read(prompts)

    def step(self, tokens: Sequence[int] | Ids) -> Logits:
        """Appends one token to each text; returns the logits of the next ones, float32 [B, V]."""
        with self._there():
            return self._texts.step(tokens)

    def keep(self, order: Sequence[int]) -> None:
        """Keeps the texts with these numbers, in this order, and drops the others."""
        self._texts.keep(order)

    def _there(self) -> AbstractContextManager[object]:
        return self._runner.on_device()


def room(rows: int, context: int, wanted: int, free_bytes: int | None, token_bytes: int) -> int:
    """Returns the tokens that keys and values get room for.

    Args:
        rows: Most texts at once.
        context: Most tokens of each.
        wanted: What a deployment asks for; 0: whatever fits.
        free_bytes: Free memory of the GPU; None: it is no limit.
        token_bytes: Keys and values of a token.

    Raises:
        RuntimeError: One text has no room.
    """
    page = SLOTS * token_bytes
    fitting = rows * cdiv(context, SLOTS)
    if wanted:
        fitting = wanted // SLOTS
    elif free_bytes is not None:
        fitting = min(fitting, int(SHARE * free_bytes) // page - 1)  # one page is nobody's
    if fitting < cdiv(context, SLOTS):
        given = f"cache_tokens: {wanted} given" if wanted else f"{free_bytes} bytes of the GPU are free"
        raise RuntimeError(
            f"{given}; a text of {context} tokens takes pages for {cdiv(context, SLOTS) * SLOTS}, {token_bytes} bytes each, and its cache "
            "one page more: give a smaller context in config.pbtxt"
        )
    return fitting * SLOTS


def powers(most: int) -> list[int]:
    """Returns the powers of two below a number, and the number."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
