"""Training rows of sounds: kept in memory or decoded again, a batch is what the preprocessor makes of its rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foundation.standalone.preprocess import Preprocessor
from foundation.training import rows as training_rows
from foundation.training.rows import Rows
from tests import tiny_sounds

RANDOM = np.random.default_rng(0)
ROWS = [tiny_sounds.encoded(tiny_sounds.wave("noise", seconds, RANDOM)) for seconds in (0.05, 0.101, 0.02, 0.2, 0.06)]
WAVEFORM = {"kind": "waveform", "sampling_rate": 8000, "do_normalize": True, "least": 80}
SPECTROGRAM = {
    "kind": "spectrogram",
    "sampling_rate": 8000,
    "do_normalize": True,
    "num_mel_bins": 8,
    "max_length": 4,
    "mean": 0.0,
    "std": 1.0,
}


def waveforms(*names: str) -> Preprocessor:
    return Preprocessor("audio", names, ("a", "b"), "audio-classification", 1000, (500, 1000), sound=WAVEFORM)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("chosen", [[2, 0, 4], [1, 2], [3]])
def test_a_batch_of_waveforms(chosen: list[int], kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_rows, "CHUNK", 2)
    if not kept:
        monkeypatch.setattr(training_rows, "IMAGE_CACHE_BYTES", 4 * 700)  # the first rows fit, all do not
    longest = max(min(len(samples_of(index)), 1000) for index in chosen)
    for names, width in (
        (("input_values", "attention_mask"), min(-(-longest // 8) * 8, 1000)),  # told what is padding: to the longest row
        (("input_values",), 500 if longest <= 500 else 1000),  # not told: as the engine pads
    ):
        prepared = waveforms(*names)
        rows = Rows.prepare(ROWS, prepared)
        assert bool(rows.tokens) is kept
        assert rows.lengths.tolist() == [400, 808, 160, 1000, 480]
        found = rows.batch(np.array(chosen))
        expected = prepared.encode([ROWS[index] for index in chosen], width)
        assert list(found) == list(expected) == list(names)
        for name, values in found.items():
            assert torch.equal(values, torch.from_numpy(expected[name])), name


def samples_of(index: int) -> np.ndarray:
    from foundation.standalone.sound import read_sound

    return read_sound(ROWS[index])[0]


@pytest.mark.parametrize("kept", [True, False])
def test_a_batch_of_spectrograms(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        monkeypatch.setattr(training_rows, "IMAGE_CACHE_BYTES", 10)
    prepared = Preprocessor("audio", ("input_values",), ("a", "b"), "audio-classification", sound=SPECTROGRAM)
    rows = Rows.prepare(ROWS, prepared)
    assert (rows.pixels is not None) is kept
    found = rows.batch(np.array([3, 0]))
    assert torch.equal(found["input_values"], torch.from_numpy(prepared.encode([ROWS[3], ROWS[0]])["input_values"]))
