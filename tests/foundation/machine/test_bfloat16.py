"""bfloat16 is used where a product is faster in it, measured once for a processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foundation.machine import bfloat16
from foundation.machine.environment import cache_folder
from foundation.training import precision


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def unasked() -> float:
    raise AssertionError("measured again")


@pytest.mark.parametrize(("gain", "pays"), [(0.6, False), (1.0, False), (1.19, False), (1.2, True), (8.0, True)])
def test_it_pays_where_the_gain_is_more_than_casting_takes_and_is_measured_once(gain: float, pays: bool) -> None:
    assert bfloat16.bfloat16_pays(lambda: gain) == pays
    assert bfloat16.bfloat16_pays(unasked) == pays


def test_a_file_that_is_damaged_is_measured_again_and_another_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bfloat16.bfloat16_pays(lambda: 0.5)
    (kept,) = (cache_folder() / "bfloat16").iterdir()
    for text in ("", "[]", '{"gain": "fast"}', "{}"):
        kept.write_text(text)
        assert bfloat16.bfloat16_pays(lambda: 2.0)
        assert bfloat16.bfloat16_pays(unasked)
    monkeypatch.setattr(bfloat16, "versions", lambda: {"torch": "another"})
    assert not bfloat16.bfloat16_pays(lambda: 0.5)


def test_the_gain_is_a_ratio_of_the_times_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, clock, product = torch.get_num_threads(), [0.0], torch.nn.functional.linear
    took = {torch.float32: 0.006, torch.bfloat16: 0.002}

    def linear(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        assert torch.get_num_threads() == 1
        clock[0] += took[left.dtype]
        return product(left[:1, :1], right[:1, :1])

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(bfloat16.time, "thread_time", lambda: clock[0])
    assert bfloat16.gain() == pytest.approx(3.0)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("instructions", "pays", "dtype"), [(True, True, "bfloat16"), (True, False, "float32"), (False, True, "float32")])
def test_a_processor_trains_in_bfloat16_if_it_has_it_and_is_faster(
    instructions: bool, pays: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(precision, "bfloat16_pays", lambda: pays)
    assert precision.autocast_dtype(torch.device("cpu")) == getattr(torch, dtype)
