"""Decoders on the kernels in the server: the room of the cache, who is read with whom, the device, and what an error leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.fused.decoder import served
from export.fused.decoder.cache import SLOTS
from export.fused.decoder.parts import decoder_plan
from export.fused.decoder.plan import write_decoder
from export.fused.decoder.served import READ_TOKENS, SHARE, KernelDecoder, powers, room
from export.fused.runner import device_here
from foundation.models.folder import Checkpoint
from tests.export.fused.decoder import decoders
from tests.export.fused.decoder.decoders import LENGTH, Shape

pytestmark = pytest.mark.whole

PROPERTIES = {"float_precision": "fp32"}


@given(st.integers(1, 8), st.integers(1, 500), st.integers(0, 10**6), st.integers(1, 10**3))
def test_the_cache_has_room_for_one_text_at_least_and_for_no_more_than_is_free(rows: int, context: int, free: int, each: int) -> None:
    one = -(-context // SLOTS)
    fitting = [pages for pages in range(rows * one + 1) if (pages + 1) * SLOTS * each <= int(SHARE * free)]  # one more is nobody's
    most = max(fitting, default=0)
    if most < one:
        with pytest.raises(RuntimeError, match=f"^{free} bytes of the GPU are free; .* give a smaller context"):
            room(rows, context, 0, free, each)
    else:
        assert room(rows, context, 0, free, each) == most * SLOTS
    assert room(rows, context, 0, None, each) == rows * one * SLOTS


def test_a_deployment_may_say_how_much_room_there_is() -> None:
    assert room(8, 100, 10_007, 1, 64) == 10_000
    with pytest.raises(RuntimeError, match=r"cache_tokens: 111 given; a text of 100 tokens takes pages for 112, .* smaller context"):
        room(8, 100, 111, None, 64)
    assert room(8, 100, 112, None, 64) == 112


def test_prompts_are_read_together_up_to_some_tokens_and_none_is_lost() -> None:
    lengths = [3, READ_TOKENS - 3, 1, READ_TOKENS + 5, 7, 2]
    groups = list(KernelDecoder.groups(object.__new__(KernelDecoder), [np.zeros(length, np.int64) for length in lengths]))
    assert [[len(prompt) for prompt in group] for group in groups] == [lengths[:2], lengths[2:3], lengths[3:4], lengths[4:]]


def test_steps_are_prepared_for_every_power_of_two() -> None:
    assert [powers(most) for most in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_an_instance_runs_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no NVIDIA GPU; start the container with --gpus all"):
        device_here(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    assert [device_here(ordinal) for ordinal in (0, 3, None)] == ["cuda:0", "cuda:3", "cuda:5"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert device_here(3) == "cpu"


def test_on_a_gpu_every_size_is_prepared_within_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a runner that stands for one on the third of four GPUs."""
    asked: list[Any] = []

    class Texts:
        cache = SimpleNamespace(free_tokens=20 * SLOTS)

        def read(self, ids: Any) -> None:
            assert torch.is_inference_mode_enabled()  # as the device is current
            asked.append([len(one) for one in ids] if isinstance(ids[0], list) else len(ids))

        step = read

        def clear(self) -> None:
            asked.append("clear")

    class Runner:
        dtype = torch.float16
        plan = SimpleNamespace(longest=100, reads=lambda float_bytes: {"cache_bytes_per_token": 10 * float_bytes})

        def __init__(self, path: Path, device: str, floating: str) -> None:
            asked.append((path.name, device, floating))
            self.device = torch.device(device)

        def texts_within(self, tokens: int, longest: int) -> Texts:
            asked.append((tokens, longest))
            return Texts()

        def on_device(self) -> Any:
            return torch.inference_mode()

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(served, "DecoderRunner", Runner)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (round(21 * SLOTS * 20 / SHARE), 0) if device.index == 2 else (0, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append(f"waited for {device.index}"))
    decoder = KernelDecoder(Path(), {"float_precision": "fp16"}, 2, rows=3, context=90)
    assert asked == [("plan.safetensors", "cuda:2", "fp16"), (min(3 * 96, 20 * SLOTS), 90)]
    assert [decoder.fits([96] * 3), decoder.fits([96] * 3 + [32]), decoder.fits([96] * 3 + [33])] == [True, True, False]
    asked.clear()
    decoder.prepare()
    reads = [[length] for length in (1, 2, 4, 8, 16, 32, 64, 90)]
    steps = [[1] * count if part else count for count in (1, 2, 3) for part in (True, False)]
    assert [one for one in asked if not isinstance(one, str)] == [*reads, *steps]
    assert [one for one in asked if isinstance(one, str)] == ["clear", "waited for 2"] * (len(reads) + 3)
    with pytest.raises(RuntimeError, match="context: 101 tokens given; the model reads 100"):
        KernelDecoder(Path(), PROPERTIES, 2, rows=3, context=101)


def fails_and_goes_on(folder: Path) -> tuple[list[list[int]], list[Any]]:
    """Returns what is written before and after a pass that fails, and the pages that are free by then; called in the interpreter."""
    decoder = KernelDecoder(folder, PROPERTIES, 7, rows=2, context=LENGTH)
    decoder.prepare()
    answers, states = [], list[Any]()
    for _ in range(2):
        texts = decoder.texts()
        states.append((texts.lengths, decoder._texts.cache.free_tokens))
        logits = [texts.read([np.array([5, 9, 31], np.int64)]), texts.step(np.array([7], np.int64))]
        answers.append([int(one.argmax()) for one in logits])
        read = decoder._runner._decoder.read
        decoder._runner._decoder.read = lambda *_: 1 / 0  # type: ignore[method-assign]
        try:
            texts.read([np.array([3] * 9, np.int64)])
        except ZeroDivisionError:
            states.append((texts.lengths, decoder._texts.cache.free_tokens))
        decoder._runner._decoder.read = read  # type: ignore[method-assign]
    return answers, states


@pytest.mark.slow
def test_after_an_error_no_page_is_lost(interpreted: Callable[..., Any], tmp_path: Path) -> None:
    folder = decoders.checkpoint(tmp_path, Shape("llama", config={"num_hidden_layers": 1}))
    write_decoder(decoder_plan(Checkpoint(folder)), tmp_path / "plan.safetensors")
    (first, again), states = interpreted(fails_and_goes_on, tmp_path)
    assert first == again
    whole = 2 * 2 * SLOTS  # two texts of two pages
    assert states == [([], whole), ([4], whole - 2 * SLOTS)] * 2
