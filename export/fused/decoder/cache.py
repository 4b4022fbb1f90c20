"""A cache of keys and values in pages: which page of memory holds which tokens of which text.

    pages of a layer    keys and values [P, S, K, D]; slot s of page p is row p S + s
    a text              pages in the order of its tokens; token t is in slot t mod S of its page t div S

Kwon et al. 2023, https://arxiv.org/abs/2309.06180. A text takes a page where its last one is full, and gives all back when it ends;
nothing is copied or moved. Page 0 belongs to nobody: rows that fill a recording up write there.

Left out: pages that texts with the same beginning share, and texts that are moved to the memory of the host.

Shape suffixes: N new tokens, B texts, P pages, S slots, K heads of keys and values, D dimension of a head, W pages of the longest text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from export.fused.decoder.plan import DecoderPlan
from export.kernels.launch import cdiv
from export.kernels.paged_attention import Pages
from foundation.core.errors import InputError

SLOTS = 16
"""Tokens of a page."""
NOBODY = 0
"""The page of no text."""


@dataclass
class Text:
    """A text whose keys and values are in the cache."""

    pages: list[int] = field(default_factory=list)
    length: int = 0
    """Tokens that the cache holds."""


@dataclass(frozen=True)
class New:
    """New tokens of texts, and where everything of them is."""

    word: Tensor
    """Token ids, int64 [N]."""
    position: Tensor
    """Positions, int64 [N]."""
    slots: Tensor
    """Row of the pages that takes key and value of each, int64 [N]."""
    sequence: Tensor
    """Text of each, int32 [N]."""
    length: Tensor
    """Keys that each sees, int32 [N]."""
    table: Tensor
    """Pages of each text, int32 [B, W]."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by the names of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to(self, device: torch.device) -> New:
        """Returns them on a device."""
        return New(**{name: tensor.to(device) for name, tensor in self.tensors.items()})

    def filled(self, rows: int) -> New:
        """Returns so many tokens of so many texts, one each; those that are added write to the page of nobody, and see it alone."""
        more = {name: tensor.new_zeros(rows - len(tensor), *tensor.shape[1:]) for name, tensor in self.tensors.items()}
        more["length"] += 1
        more["sequence"] += torch.arange(len(self.table), rows, dtype=torch.int32, device=self.table.device)
        return New(**{name: torch.cat([tensor, more[name]]) for name, tensor in self.tensors.items()})


class Cache:
    """Pages for all layers of a decoder.

    Args:
        plan: The decoder.
        device: Where they are.
        dtype: float32 or float16.
        tokens: Tokens that all texts together have room for; whole pages.
        slots: Tokens of a page.
        order: Order in which pages are taken; None: ascending. No order changes a bit of any answer.
        longest: Most tokens of a text, where these are fewer than the model reads; by it programs are launched, and no bit depends on it.

    Raises:
        InputError: There is no room for one token, or the order does not name every page once.
    """

    def __init__(
        self,
        plan: DecoderPlan,
        device: torch.device,
        dtype: torch.dtype,
        tokens: int,
        slots: int = SLOTS,
        order: Iterable[int] | None = None,
        longest: int | None = None,
    ) -> None:
        if tokens < 1 or slots < 1:
            raise InputError("tokens, slots", f"{tokens} and {slots} given", "at least 1 token, in pages of at least 1, is allowed")
        pages = cdiv(tokens, slots)
        everything = range(1, pages + 1)
        self._order = list(everything if order is None else order)
        if sorted(self._order) != list(everything):
            raise InputError("order", f"{self._order} given", f"every page from 1 to {pages} is allowed once")
        self.clear()
        self._longest = min(longest or plan.longest, plan.longest)
        self._slots, self._width = slots, cdiv(self._longest, slots)
        shapes = [(pages + 1, slots, block.key_heads, block.head_dim) for block in plan.blocks]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

    @property
    def free_tokens(self) -> int:
        """Tokens that free pages have room for."""
        return len(self._free) * self._slots

    def needed(self, text: Text, tokens: int) -> int:
        """Returns the free pages that so many more tokens of a text take."""
        return max(0, cdiv(text.length + tokens, self._slots) - len(text.pages))

    def extended(self, texts: Sequence[Text], tokens: Sequence[Sequence[int]]) -> New:
        """Makes room for new tokens of some texts; returns where they go, on the CPU.

        Args:
            texts: Different texts; each is longer afterwards.
            tokens: New token ids of each, at least one.

        Raises:
            InputError: A text is longer than the model reads, or there are too few free pages; then no text has changed.
        """
        too_long = max(text.length + len(new) for text, new in zip(texts, tokens, strict=True))
        if too_long > self._longest:
            raise InputError("text", f"{too_long} tokens given", f"{self._longest} fit this cache and this model")
        wanted = sum(self.needed(text, len(new)) for text, new in zip(texts, tokens, strict=True))
        if wanted > len(self._free):
            remedy = "give a larger cache, or fewer texts at once"
            raise InputError("cache", f"{wanted} more pages of {self._slots} tokens needed", f"{len(self._free)} are free", remedy)
        word, position, slots, sequence = [], [], [], []
        table = torch.zeros(len(texts), self._width, dtype=torch.int32)
        for number, (text, new) in enumerate(zip(texts, tokens, strict=True)):
            text.pages += [self._free.pop() for _ in range(self.needed(text, len(new)))]
            places = range(text.length, text.length + len(new))
            word += list(new)
            position += list(places)
            slots += [text.pages[place // self._slots] * self._slots + place % self._slots for place in places]
            sequence += [number] * len(new)
            text.length += len(new)
            table[number, : len(text.pages)] = torch.tensor(text.pages, dtype=torch.int32)
        word_N, position_N, slots_N = (torch.tensor(one, dtype=torch.int64) for one in (word, position, slots))
        return New(word_N, position_N, slots_N, torch.tensor(sequence, dtype=torch.int32), (position_N + 1).int(), table)

    def drop(self, text: Text) -> None:
        """Gives the pages of a text back."""
        self._free += reversed(text.pages)
        text.pages, text.length = [], 0

    def clear(self) -> None:
        """Frees every page, whichever text had it: texts of before are none any more."""
        self._free = self._order[::-1]

    def pages(self, layer: int, new: New) -> Pages:
        """Returns keys and values of a layer for new tokens."""
        return Pages(self.keys[layer], self.values[layer], new.table, new.sequence, new.length)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a layer by rows, [P S, K, D] each, in the memory of the pages."""
        return self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)
