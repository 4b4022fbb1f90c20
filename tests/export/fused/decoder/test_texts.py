"""Answers from a cache of pages: torch's greedy tokens, on any pages, while texts come and go; what does not fit changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export.fused.decoder.cache import NOBODY, Cache, Text
from export.fused.decoder.parts import decoder_plan
from export.fused.decoder.plan import DecoderPlan
from export.fused.decoder.texts import Texts
from foundation.core.errors import InputError
from foundation.models.folder import Checkpoint
from tests.export.fused.decoder import decoders
from tests.export.fused.decoder.decoders import LENGTH, Shape, Written
from tests.export.fused.encoders import Again
from tests.seldom import seldom

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]
PROMPTS = [[5, 9, 31, 7], [3], [40, 4, 4, 18, 22, 6, 11, 30]]
"""With pages of four tokens: a full page, one token, two full pages."""
SCHEMES = {
    "gpt2": "w8a8",
    "gpt2, int4": "w4a16",
    "gpt2, int8 weights": "w8a16",
    "llama": "w8a8-dynamic",
    "llama, int4": "w4a16",
    "llama, int8 weights": "w8a16",
    "llama, one scale": "w8a8",
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", seldom(SCHEMES, ("gpt2, int4", "gpt2, int8 weights", "llama, one scale")))
def test_greedy_tokens_are_torchs_on_any_pages(name: str, interpreted: Interpreted, tmp_path: Path) -> None:
    folder = decoders.checkpoint(tmp_path, Shape(name.partition(",")[0], SCHEMES[name]))
    wanted = decoders.greedy_in_torch(folder, PROMPTS, 6)
    ways = [Written(slots=4, tokens=6), Written(slots=3, tokens=6, reverse=True, record=True)]
    assert interpreted(decoders.greedy_in_kernels, folder, PROMPTS, ways) == [wanted, wanted]
    assert len({token for answer in wanted for token in answer}) > 4  # or equality would prove little


def test_texts_come_and_go_without_changing_each_other(interpreted: Interpreted, tmp_path: Path) -> None:
    """The head is int8, as torch adds up a float one in another order for another number of texts."""
    folder = decoders.checkpoint(tmp_path, Shape("llama", head=True, config={"num_hidden_layers": 1}))
    together, alone = interpreted(come_and_go, folder)
    for name, logits in together.items():
        assert np.array_equal(logits, alone[name]), name


def come_and_go(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the states' logits of two texts that are written among others, on pages that others gave back, and by themselves."""
    decoder = decoders.decoder_of(folder)
    texts, free = Texts(decoder, 64, None, 4), Texts(decoder, 64, Again, 4, longest=20)
    found: dict[str, Any] = {}
    texts.read([PROMPTS[0], PROMPTS[2]])
    texts.step([1, 2])
    texts.keep([1])  # the first one's pages are free, in the middle of the memory
    found["read"] = texts.read([PROMPTS[2] * 2])[0]
    for number, token in enumerate((8, 9, 10)):
        found[f"step {number}"] = texts.step([3, token])[1]
    texts.keep([1])
    found["last"] = texts.step([11])[0]
    alone = {"read": free.read([PROMPTS[2] * 2])[0]}
    for number, token in enumerate((8, 9, 10)):
        alone[f"step {number}"] = free.step([token])[0]
    alone["last"] = free.step([11])[0]
    assert texts.lengths == free.lengths == [20]
    assert texts.cache.free_tokens == free.cache.free_tokens
    return found, alone


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> DecoderPlan:
    return decoder_plan(Checkpoint(decoders.checkpoint(tmp_path_factory.mktemp("plan"), Shape("llama"))))


def cache_of(plan: DecoderPlan, tokens: int, slots: int = 4) -> Cache:
    return Cache(plan, torch.device("cpu"), torch.float32, tokens, slots)


@pytest.mark.parametrize("seed", range(5))
def test_no_two_texts_share_a_slot_and_nothing_is_lost(plan: DecoderPlan, seed: int) -> None:
    """A naive model of the cache: which token of which text lies in which slot."""
    random = np.random.default_rng(seed)
    cache, texts, memory = cache_of(plan, 80, int(random.integers(1, 7))), dict[int, Text](), dict[int, tuple[int, int]]()
    whole = cache.free_tokens
    for turn in range(60):
        if texts and random.random() < 0.3:
            number = int(random.choice(list(texts)))
            cache.drop(texts.pop(number))
            memory = {slot: held for slot, held in memory.items() if held[0] != number}
            continue
        number = int(random.choice(list(texts))) if texts and random.random() < 0.7 else turn
        text, count = texts.setdefault(number, Text()), int(random.integers(1, 6))
        before = text.length
        try:
            new = cache.extended([text], [[7] * count])
        except InputError:
            assert text.length == before
            assert before + count > LENGTH or cache.needed(text, count) * cache.keys[0].shape[1] > cache.free_tokens
            texts = {key: one for key, one in texts.items() if one.length}
            continue
        assert new.position.tolist() == list(range(before, text.length))
        assert new.length.tolist() == [place + 1 for place in new.position.tolist()]
        for slot, place in zip(new.slots.tolist(), new.position.tolist(), strict=True):
            assert slot not in memory
            assert slot // cache.keys[0].shape[1] != NOBODY
            memory[slot] = number, place
        held = {place: slot for slot, (owner, place) in memory.items() if owner == number}
        slots = cache.keys[0].shape[1]
        assert [int(new.table[0, place // slots]) * slots + place % slots for place in range(text.length)] == [
            held[place] for place in range(text.length)
        ]
    if seed % 2:
        cache.clear()
    else:
        for text in texts.values():
            cache.drop(text)
    assert cache.free_tokens == whole
    assert len({*cache._free}) == len(cache._free)


def test_what_fills_a_step_up_sees_the_page_of_nobody_alone(plan: DecoderPlan) -> None:
    cache, texts = cache_of(plan, 40), [Text(), Text(), Text()]
    new = cache.extended(texts, [[1], [2], [3]]).filled(8)
    assert new.slots[3:].tolist() == [NOBODY] * 5
    assert new.length[3:].tolist() == [1] * 5
    assert new.sequence.tolist() == list(range(8))
    assert not new.table[3:].any()


def test_what_does_not_fit_is_refused_and_changes_nothing(plan: DecoderPlan) -> None:
    cache, one, other = cache_of(plan, 8), Text(), Text()
    cache.extended([one], [[1, 2, 3]])
    with pytest.raises(InputError, match="cache: 3 more pages of 4 tokens needed; 1 are free: give a larger cache"):
        cache.extended([one, other], [[4, 5], [1] * 5])
    assert (one.length, len(one.pages), other.pages, cache.free_tokens) == (3, 1, [], 4)
    with pytest.raises(InputError, match=f"text: {LENGTH + 1} tokens given; {LENGTH} fit"):
        cache_of(plan, 100).extended([Text()], [[1] * (LENGTH + 1)])
    short = Cache(plan, torch.device("cpu"), torch.float32, 100, 4, longest=6)
    assert short.extended([Text()], [[1] * 6]).table.shape == (1, 2)
    with pytest.raises(InputError, match="text: 7 tokens given; 6 fit"):
        short.extended([Text()], [[1] * 7])
    for tokens, slots in ((0, 4), (4, 0)):
        with pytest.raises(InputError, match=f"tokens, slots: {tokens} and {slots} given"):
            Cache(plan, torch.device("cpu"), torch.float32, tokens, slots)
    with pytest.raises(InputError, match=r"order: \[1, 1\] given; every page from 1 to 2 is allowed once"):
        Cache(plan, torch.device("cpu"), torch.float32, 8, 4, [1, 1])
