"""Sounds: decoding held against the samples that were written, features against Transformers' feature extractors, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import ASTFeatureExtractor, Wav2Vec2FeatureExtractor

from foundation.standalone import sound
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.sound import BadSound, SoundSteps, is_sound, log_mel, mel_filters, read_sound, resampled, silence
from tests.tiny_sounds import encoded

RATE = 16000
RANDOM = np.random.default_rng(0)
SAMPLES = (0.3 * np.sin(np.arange(7321) / 9) + 0.05 * RANDOM.standard_normal(7321)).astype(np.float32)
STEP = {"PCM_U8": 2**-7, "PCM_S8": 2**-7, "PCM_16": 2**-15, "PCM_24": 2**-23, "PCM_32": 2**-24, "FLOAT": 0.0, "DOUBLE": 0.0}
"""Largest difference of a sample that is stored so; float32 itself rounds at 2^-24."""
WAVEFORM = {"kind": "waveform", "sampling_rate": RATE, "do_normalize": True, "least": 400}
SPECTROGRAM = {
    "kind": "spectrogram",
    "sampling_rate": RATE,
    "do_normalize": True,
    "num_mel_bins": 24,
    "max_length": 50,
    "mean": -4.0,
    "std": 4.5,
}


@pytest.mark.parametrize(("form", "subtype"), [("WAV", name) for name in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")])
def test_wav_gives_back_what_was_written(form: str, subtype: str) -> None:
    samples, rate = read_sound(encoded(SAMPLES, RATE, form, subtype))
    assert (rate, samples.dtype, samples.shape) == (RATE, np.float32, SAMPLES.shape)
    assert np.abs(samples - SAMPLES).max() <= STEP[subtype]


@pytest.mark.parametrize("subtype", ["PCM_S8", "PCM_16", "PCM_24"])
@pytest.mark.parametrize("form", ["FLAC", "WAVEX"])
def test_flac_and_extensible_wav_do_too(form: str, subtype: str) -> None:
    subtype = "PCM_U8" if (form, subtype) == ("WAVEX", "PCM_S8") else subtype
    samples, _ = read_sound(encoded(SAMPLES, RATE, form, subtype))
    assert np.abs(samples - SAMPLES).max() <= STEP[subtype]


def test_channels_are_averaged() -> None:
    channels = np.stack([SAMPLES, -SAMPLES, 0.5 * SAMPLES], axis=1)
    samples, _ = read_sound(encoded(channels, RATE, "WAV", "FLOAT"))
    np.testing.assert_allclose(samples, channels.mean(axis=1), atol=1e-7)


@pytest.mark.parametrize(("rate", "wanted"), [(8000, 16000), (44100, 16000), (48000, 8000), (11025, 16000)])
def test_resampling_keeps_a_tone_and_takes_away_what_would_alias(rate: int, wanted: int) -> None:
    def tone(hertz: float, at: int, length: int) -> np.ndarray:
        found: np.ndarray = np.sin(2 * np.pi * hertz * np.arange(length) / at).astype(np.float32)
        return found

    made = resampled(tone(440, rate, rate), rate, wanted)
    assert (len(made), made.dtype) == (wanted, np.float32)
    middle = slice(wanted // 10, -wanted // 10)
    np.testing.assert_allclose(made[middle], tone(440, wanted, wanted)[middle], atol=2e-3)
    if rate > wanted:
        high = resampled(tone(0.5 * wanted * 1.2, rate, rate), rate, wanted)
        assert np.abs(high[middle]).max() < 1e-3


@pytest.mark.parametrize("seconds", [0.05, 0.3])
def test_resampled_lengths_are_rounded_up(seconds: float) -> None:
    for rate in (8000, 11025, 44100):
        length = int(seconds * rate) + 1
        assert len(resampled(np.ones(length, np.float32), rate, RATE)) == -(-length * RATE // rate)


def extracted(rows: list[np.ndarray], **settings: Any) -> Any:
    return Wav2Vec2FeatureExtractor(sampling_rate=RATE, **settings)(rows, sampling_rate=RATE, return_tensors="np", padding="max_length",
                                                                    max_length=8000, truncation=True)  # fmt: skip


@pytest.mark.parametrize("normalize", [True, False])
def test_waveforms_with_a_mask_are_those_of_transformers(normalize: bool) -> None:
    rows = [SAMPLES, SAMPLES[:900], np.tile(SAMPLES, 2)]  # whole, short, cut
    made = Preprocessor("audio", ("input_values", "attention_mask"), ("a", "b"), "audio-classification", 8000, (8000,),
                        sound={**WAVEFORM, "do_normalize": normalize})  # fmt: skip
    found = made.encode([encoded(row, RATE, "WAV", "FLOAT") for row in rows])
    expected = extracted(rows, return_attention_mask=True, do_normalize=normalize)
    np.testing.assert_array_equal(found["attention_mask"], expected["attention_mask"])
    np.testing.assert_allclose(found["input_values"], expected["input_values"], atol=1e-6)
    assert (found["input_values"].dtype, found["attention_mask"].dtype) == (np.float32, np.int64)


def test_waveforms_without_a_mask_are_those_of_transformers_with_zeros_behind() -> None:
    made = Preprocessor("audio", ("input_values",), ("a", "b"), "audio-classification", 8000, (2000, 8000), sound=WAVEFORM)
    for row in (SAMPLES, SAMPLES[:900]):
        alone = Wav2Vec2FeatureExtractor(sampling_rate=RATE)(row, sampling_rate=RATE, return_tensors="np")["input_values"][0]
        found = made.encode([encoded(row, RATE, "WAV", "FLOAT")])["input_values"][0]
        assert len(found) == (2000 if len(row) == 900 else 8000)
        np.testing.assert_allclose(found[: len(row)], alone, atol=1e-6)
        assert not found[len(row) :].any()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("bins", "rate"), [(24, 16000), (128, 16000), (40, 8000)])
def test_spectrograms_are_those_of_transformers(bins: int, rate: int, normalize: bool) -> None:
    settings = {"num_mel_bins": bins, "max_length": 30, "sampling_rate": rate, "mean": -3.9, "std": 4.1, "do_normalize": normalize}
    steps, extractor = SoundSteps.build({"kind": "spectrogram", **settings}), ASTFeatureExtractor(**settings)
    for row in (SAMPLES, SAMPLES[:2000], SAMPLES[:400]):  # longer than 30 frames, shorter, one frame
        expected = extractor(row, sampling_rate=rate, return_tensors="np")["input_values"][0]
        found = steps(encoded(row, rate, "WAV", "FLOAT"))
        assert (found.shape, found.dtype) == ((30, bins), np.float32)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_spectrogram_is_its_formula_written_out() -> None:
    filters = mel_filters(12, RATE)
    expected = []
    for start in range(0, len(SAMPLES) - 400 + 1, 160):
        frame = SAMPLES[start : start + 400].astype(np.float64)
        frame = frame - frame.mean()
        frame = np.array([frame[0] * 0.03] + [frame[i] - 0.97 * frame[i - 1] for i in range(1, 400)])
        frame *= 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 399)
        angles = np.exp(-2j * np.pi * np.outer(np.arange(257), np.arange(400)) / 512)
        expected.append(np.log(np.maximum(np.abs(angles @ frame) ** 2 @ filters, 1.192092955078125e-07)))
    np.testing.assert_allclose(log_mel(SAMPLES, np.hanning(400), filters), np.array(expected), rtol=1e-5, atol=1e-5)


def test_rows_are_grouped_by_their_bucket_and_each_comes_once() -> None:
    made = Preprocessor("audio", ("input_values",), ("a", "b"), "audio-classification", 4000, (1000, 2000, 4000), sound=WAVEFORM)
    lengths = [900, 3000, 1000, 1001, 9000, 2000, 10]
    rows = [encoded(SAMPLES[:length] if length < 7000 else np.tile(SAMPLES, 2)[:length], RATE) for length in lengths]
    assert made.groups(rows) == {1000: [0, 2, 6], 2000: [3, 5], 4000: [1, 4]}
    batches = list(made.batches(rows, 2))
    assert sorted(index for indices, _ in batches for index in indices) == list(range(7))
    for indices, features in batches:
        for place, index in enumerate(indices):
            np.testing.assert_array_equal(features["input_values"][place], made.encode([rows[index]])["input_values"][0])
    with pytest.raises(ValueError, match="a row of 3000 samples does not fit into 2000"):
        made.encode([rows[1]], 2000)
    assert made.encode([], 0)["input_values"].shape == (0, 0)


def test_more_rows_than_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound, "AT_ONCE", 3)
    made = Preprocessor("audio", ("input_values",), ("a", "b"), "audio-classification", 1000, (1000,), sound=WAVEFORM)
    rows = [encoded(SAMPLES[: 500 + 10 * index], RATE) for index in range(8)]
    found = np.zeros((8, 1000), np.float32)
    for indices, features in made.batches(rows, 2):
        found[indices] = features["input_values"]
    np.testing.assert_array_equal(found, made.encode(rows)["input_values"])


def test_a_sound_shorter_than_the_model_reads_is_filled_with_zeros() -> None:
    steps = SoundSteps.build({**WAVEFORM, "do_normalize": False})
    made = steps(encoded(SAMPLES[:30], RATE, "WAV", "FLOAT"))
    assert len(made) == 400
    np.testing.assert_array_equal(made[:30], SAMPLES[:30])
    assert not made[30:].any()
    assert not SoundSteps.build({**SPECTROGRAM, "do_normalize": False})(silence(10, RATE)).any()  # not one whole frame


WAV, FLAC = encoded(SAMPLES, RATE), encoded(SAMPLES, RATE, "FLAC")
BAD = {
    "empty": (b"", "neither WAV nor FLAC"),
    "text": (b"hello", "neither WAV nor FLAC"),
    "mp3": (b"ID3\x04" + bytes(100), "neither WAV nor FLAC"),
    "a header alone": (WAV[:44], "without samples"),
    "half a header": (WAV[:20], "not a readable sound"),
    "a cut wav": (WAV[:3000], "ends too early"),
    "a cut flac": (FLAC[: len(FLAC) // 2], "sound"),
    "no samples": (silence(0, RATE), "without samples"),
    "a rate of 10": (silence(20, 10), "a sound of 10 samples per second; 1000 to 384000 are allowed"),
    "not a number": (encoded(np.array([0.1, np.nan], np.float32), RATE, "WAV", "FLOAT"), "NaN or infinite"),
    "garbage after the magic": (b"RIFF" + bytes(range(200)), "not a readable sound"),
}


@pytest.mark.parametrize(("data", "reason"), BAD.values(), ids=BAD)
def test_what_is_no_sound_is_refused_in_one_line(data: bytes, reason: str) -> None:
    with pytest.raises(BadSound, match=reason) as caught:
        read_sound(data)
    assert "\n" not in str(caught.value)
    assert "0x" not in str(caught.value)


def test_sounds_that_are_too_large_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound, "MAX_SAMPLES", 5000)
    with pytest.raises(BadSound, match="7321 samples in 1 channels; at most 5000 samples in all"):
        read_sound(WAV)
    with pytest.raises(BadSound, match="6000 samples at 16000 Hz; at most 5000"):
        resampled(SAMPLES[:3000], 8000, RATE)
    monkeypatch.setattr(sound, "MAX_SOUND_BYTES", 1000)
    with pytest.raises(BadSound, match="a sound of 14686 bytes; at most 1000 are allowed"):
        read_sound(WAV)


Order = Literal["little", "big"]
NO_SIZES = (0, 0x7FFFF000, 0x7FFFFFFF, 0x7FFFFFFF - 36, 0x7FFFF000 // 6 * 6, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFF - 36, 0xFFFFF000)
"""What programs write that do not know the size yet: 0, arecord, sox, ffmpeg, and what they take off for headers or parts of a frame."""


def wav(riff: int | None, data: int | None, order: Order = "little", before: bytes = b"", behind: bytes = b"", channels: int = 1) -> bytes:
    """A WAV file of 16 bits with these sizes; None: the right ones."""
    number = lambda value, size: int(value).to_bytes(size, order)  # noqa: E731
    samples = np.round(SAMPLES * 2**15).astype("<i2" if order == "little" else ">i2").repeat(channels).tobytes()
    about = number(1, 2) + number(channels, 2) + number(RATE, 4) + number(2 * channels * RATE, 4) + number(2 * channels, 2) + number(16, 2)
    size = len(samples) if data is None else data
    body = b"WAVEfmt " + number(16, 4) + about + before + b"data" + number(size, 4) + samples + behind
    return (b"RIFF" if order == "little" else b"RIFX") + number(len(body) if riff is None else riff, 4) + body


LISTED = b"LIST\x04\0\0\0INFO"


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("data", NO_SIZES)
@pytest.mark.parametrize("riff", [None, 0, 36, 0x7FFFF024, 0xFFFFFFFF])
def test_the_samples_of_a_stream_go_on_to_its_end(riff: int | None, data: int, order: Order) -> None:
    for channels in (1, 3):
        before = LISTED if order == "little" and riff else b""
        samples, rate = read_sound(wav(riff, data, order, before, channels=channels))
        assert rate == RATE
        assert samples.shape == SAMPLES.shape
        assert np.abs(samples - SAMPLES).max() <= STEP["PCM_16"]


@pytest.mark.parametrize("order", ["little", "big"])
def test_a_file_that_says_its_size_and_is_shorter_is_refused(order: Order) -> None:
    for cut in (1, 2, 101, len(SAMPLES)):
        with pytest.raises(BadSound, match="ends too early"):
            read_sound(wav(None, None, order)[:-cut])
    with pytest.raises(BadSound, match="ends too early"):
        read_sound(wav(None, 2**30, order))  # larger than any sound that is allowed, and yet a size


def test_chunks_behind_no_samples_are_no_samples() -> None:
    empty = wav(None, 0)[: -2 * len(SAMPLES)]
    for behind in (b"", LISTED, LISTED + b"note\x03\0\0\0abc\0"):
        with pytest.raises(BadSound, match="without samples"):
            read_sound(empty + behind)
    samples, _ = read_sound(wav(None, None, behind=LISTED))
    assert len(samples) == len(SAMPLES)


def test_a_flac_stream_need_not_say_how_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound, "BLOCK", 1000)
    unknown = bytearray(FLAC)
    unknown[21] &= 0xF0  # 36 bits of STREAMINFO
    unknown[22:26] = bytes(4)
    samples, rate = read_sound(bytes(unknown))
    np.testing.assert_array_equal(samples, read_sound(FLAC)[0])
    assert rate == RATE
    with pytest.raises(BadSound, match="not a readable sound"):
        read_sound(bytes(unknown[: len(unknown) // 2]))
    monkeypatch.setattr(sound, "MAX_SAMPLES", 5000)
    with pytest.raises(BadSound, match="more than 5000 samples"):
        read_sound(bytes(unknown))


@given(st.integers(0, 20_000), st.binary(min_size=1, max_size=8), st.sampled_from([WAV, FLAC]))
def test_damaged_bytes_give_a_sound_or_one_line(position: int, damage: bytes, data: bytes) -> None:
    changed = bytearray(data)
    position %= len(changed)
    changed[position : position + len(damage)] = damage
    problem = ""
    try:
        samples, _ = read_sound(bytes(changed))
        assert np.isfinite(samples).all()
    except BadSound as error:
        problem = str(error)
    assert "\n" not in problem


def test_a_row_that_is_no_file_is_named() -> None:
    made = Preprocessor("audio", ("input_values",), ("a", "b"), "audio-classification", 4000, (4000,), sound=WAVEFORM)
    with pytest.raises(ValueError, match=r"row 1: str given; .* WAV or FLAC"):
        made.encode([WAV, "text"])
    with pytest.raises(ValueError, match="row 0: not a readable sound"):
        made.encode([b"text"])


def test_what_is_saved_prepares_alike(tmp_path: Any) -> None:
    for made in (
        Preprocessor("audio", ("input_values",), ("a", "b"), "audio-classification", 4000, (2000, 4000), sound=WAVEFORM),
        Preprocessor("audio", ("input_values",), ("a", "b"), "audio-classification", sound=SPECTROGRAM),
    ):
        made.save(tmp_path)
        again = Preprocessor.load(tmp_path)
        assert again == made
        rows = [encoded(SAMPLES[:3000], RATE)]
        np.testing.assert_array_equal(again.encode(rows)["input_values"], made.encode(rows)["input_values"])
        assert again.shape == (None if made.buckets else (50, 24))


def test_silence_and_names() -> None:
    samples, rate = read_sound(silence(123, 8000))
    assert (len(samples), rate, samples.any()) == (123, 8000, False)
    assert (is_sound(WAV), is_sound(FLAC), is_sound(b"\x89PNG"), is_sound(b"")) == (True, True, False, False)


def test_needs_numpy_soundfile_and_soxr_only() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'foundation.core.errors', 'pydantic', 'scipy']));"
        "sys.modules.update(dict.fromkeys(['datasets']));"
        f"import runpy; names = runpy.run_path({sound.__file__!r});"
        "samples, rate = names['read_sound'](names['silence'](9, 8000)); assert len(names['resampled'](samples, rate, 16000)) == 18"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
