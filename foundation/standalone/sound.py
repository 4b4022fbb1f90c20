"""Sounds: decodes a file, mixes its channels, resamples, and makes what an audio model reads: a waveform or a log-mel spectrogram.

This file is copied next to `preprocess.py` into the Triton server and needs only numpy (1 or 2), soundfile (libsndfile: WAV and FLAC) and
soxr (the resampler of SoX: band-limited, and as fast as scipy's `resample_poly` without that 35 MB dependency in the server).

    x = mean over channels, float32 in [-1, 1), resampled to the rate of the model and cut to its longest row

A waveform (Wav2Vec2, HuBERT, ...) is normalized over its own samples, before zeros are put after it:

    (x - mean(x)) / sqrt(var(x) + 1e-7)

A spectrogram (AST) has a frame of 400 samples every 160, whatever the rate. Of each frame: minus its mean, pre-emphasis, a symmetric Hann
window, the power spectrum of 512 points, triangular filters on Kaldi's mel scale from 20 Hz, the logarithm. Frames are cut or filled with
zeros to `max_length`, and normalized with the model's mean and twice its deviation, all as the numpy path of `ASTFeatureExtractor` of
Transformers does in float64.

Files of streams do not say how long they are: where a WAV file has 0, or about 2 or 4 GB, for the size of its samples, they extend to the
end of the file. A FLAC file may leave their number out.

Left out: compressed formats but FLAC, channels on their own, sounds longer than the longest row (their beginning is read).
"""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

BEGINNINGS = (b"RIFF", b"RIFX", b"fLaC")
"""First bytes of WAV and FLAC files."""
MAX_SOUND_BYTES = 64 * 2**20
MAX_SAMPLES = 2**25
"""Samples of all channels of a file; of one channel after resampling, too."""
MAX_CHANNELS = 64
RATES = (1000, 384_000)
"""Lowest and highest sampling rate in Hz."""
UNKNOWN_SIZE, UNKNOWN_FRAMES = 2**31 - 2**16, 2**62
"""From here on a size in bytes is none, since programs that write to a pipe put 0x7FFFF000, 0x7FFFFFFF or 0xFFFFFFFF; and a number of
frames of libsndfile."""
BLOCK = 2**16
"""Frames that are read at once where their number is unknown."""
AT_ONCE = 256
"""Rows that are decoded before the first of them is used."""
VARIANCE_FLOOR = 1e-7
FRAME, HOP, POINTS = 400, 160, 512
PRE_EMPHASIS = 0.97
LOWEST_HZ = 20.0
ENERGY_FLOOR = 1.192092955078125e-07
KEYS = ("kind", "sampling_rate", "do_normalize", "num_mel_bins", "max_length", "mean", "std", "least", "strides")


class BadSound(ValueError):
    """A sound cannot be prepared; the message says in one line what was given and what is allowed."""


def is_sound(data: bytes) -> bool:
    """Whether a file begins as WAV and FLAC files do."""
    return data[:4] in BEGINNINGS


def read_sound(data: bytes) -> tuple[NDArray[np.float32], int]:
    """Decodes a WAV or FLAC file and mixes its channels.

    Args:
        data: The encoded file: PCM of 8, 16, 24 or 32 bits or float, any number of channels.

    Returns:
        The samples float32 [T] in [-1, 1], and the sampling rate in Hz.

    Raises:
        BadSound: The data is no such file, is cut off, has no samples, has too many, or has values that are not numbers.
    """
    import soundfile

    if len(data) > MAX_SOUND_BYTES:
        raise BadSound(f"a sound of {len(data)} bytes; at most {MAX_SOUND_BYTES} are allowed")
    if not is_sound(data):
        raise BadSound("not a readable sound (neither WAV nor FLAC); a whole WAV or FLAC file is allowed")
    data, is_cut_off = _measured(data)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate, channels, frames = int(file.samplerate), int(file.channels), int(file.frames)
            if not RATES[0] <= rate <= RATES[1]:
                raise BadSound(f"a sound of {rate} samples per second; {RATES[0]} to {RATES[1]} are allowed")
            frames = 0 if frames >= UNKNOWN_FRAMES else frames
            if channels > MAX_CHANNELS or frames * channels > MAX_SAMPLES:
                raise BadSound(f"a sound of {frames} samples in {channels} channels; at most {MAX_SAMPLES} samples in all are allowed")
            samples = file.read(dtype="float32", always_2d=True) if frames else _to_the_end(file)
    except BadSound:
        raise
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError, OSError, MemoryError) as error:
        reason = " ".join(str(error).split()).rpartition(": ")[2][:120]  # the beginning names an object in memory
        raise BadSound(f"not a readable sound ({reason}); a whole WAV or FLAC file is allowed") from error
    if not len(samples):
        raise BadSound("a sound without samples; at least one is needed")
    if len(samples) < frames or is_cut_off:
        raise BadSound(f"a sound that ends too early, after {len(samples)} samples; a whole WAV or FLAC file is allowed")
    if not np.isfinite(samples).all():
        raise BadSound("a sound with values that are NaN or infinite; numbers are allowed")
    mixed: NDArray[np.float32] = samples[:, 0] if channels == 1 else samples.mean(axis=1, dtype=np.float64).astype(np.float32)
    return mixed, rate


def _to_the_end(file: Any) -> NDArray[np.float32]:
    """Returns the samples [T, channels] of a file that does not say how many it has.

    Raises:
        BadSound: There are too many.
    """
    file.seekable = lambda: False  # soundfile would look for the end after each block
    blocks = [np.zeros((0, int(file.channels)), np.float32)]
    while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
        blocks.append(block)
        if sum(one.size for one in blocks) > MAX_SAMPLES:
            raise BadSound(f"a sound of more than {MAX_SAMPLES} samples; so many in all channels are allowed")
    return np.concatenate(blocks)


def _measured(data: bytes) -> tuple[bytes, bool]:
    """Returns a file whose header states its true sizes, and whether it is a WAV file that is shorter than it says.

    libsndfile reads what there is and says nothing; of a size of 0 it reads nothing.
    """
    if data[:4] not in (b"RIFF", b"RIFX"):
        return data, False
    order: Literal["little", "big"] = "little" if data[:4] == b"RIFF" else "big"
    for name, place, size in _chunks(data, 12, order):
        if name == b"data":
            left = len(data) - place
            if size < UNKNOWN_SIZE and (size or _is_whole(data, place, order)):
                return data, size > left
            whole, samples = ((value).to_bytes(4, order) for value in (len(data) - 8, left))
            return b"".join((data[:4], whole, data[8 : place - 4], samples, data[place:])), False
    return data, False


def _chunks(data: bytes, place: int, order: Literal["little", "big"]) -> Iterator[tuple[bytes, int, int]]:
    """Yields the chunks of a WAV file from a place on: name, place of the contents, and what it says of their size."""
    while place + 8 <= len(data):
        size = int.from_bytes(data[place + 4 : place + 8], order)
        yield data[place : place + 4], place + 8, size
        place += 8 + size + size % 2


def _is_whole(data: bytes, place: int, order: Literal["little", "big"]) -> bool:
    """Whether only whole chunks follow from a place on, rather than samples."""
    end = place
    for name, begin, size in _chunks(data, place, order):
        if not (name.isascii() and name.decode("ascii").isprintable()):
            return False
        end = begin + size + size % 2
    return end in (len(data), len(data) + 1)


def silence(samples: int, rate: int) -> bytes:
    """Returns a WAV file of one channel of 16 bits that holds zeros."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(bytes(2 * samples))
    return file.getvalue()


def resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """Returns samples float32 [T] at another rate, float32 [ceil(T wanted / rate)].

    Raises:
        BadSound: There would be too many.
    """
    import soxr

    if rate == wanted:
        return samples
    length = -(-len(samples) * wanted // rate)
    if length > MAX_SAMPLES:
        raise BadSound(f"a sound of {length} samples at {wanted} Hz; at most {MAX_SAMPLES} are allowed")
    made = np.asarray(soxr.resample(samples, rate, wanted, quality="HQ"), dtype=np.float32)[:length]
    return np.pad(made, (0, length - len(made)))


@dataclass(frozen=True)
class SoundSteps:
    """The steps from a file to the input of a model."""

    kind: Literal["waveform", "spectrogram"]
    """Input of the model."""
    sampling_rate: int
    """Samples per second that the model was trained with."""
    do_normalize: bool
    """Whether to normalize the waveform, or the spectrogram with `mean` and `std`."""
    num_mel_bins: int = 0
    """Filters of a spectrogram; 0 for waveforms."""
    max_length: int = 0
    """Frames of a spectrogram; 0 for waveforms."""
    mean: float = 0.0
    """Mean of all spectrograms."""
    std: float = 0.5
    """Standard deviation of all spectrograms."""
    least: int = 0
    """Samples of the shortest waveform that the model can read; shorter ones are filled with zeros."""
    strides: Sequence[Sequence[int]] = ()
    """Kernel and stride of each convolution over a waveform, for models with logits for every frame; else empty."""
    filters: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    """Float64 [257, num_mel_bins]; empty for waveforms."""
    window: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    """Float64 [400]."""

    def __post_init__(self) -> None:
        made = mel_filters(self.num_mel_bins, self.sampling_rate) if self.kind == "spectrogram" else np.zeros((0, 0))
        object.__setattr__(self, "filters", made)
        object.__setattr__(self, "window", np.hanning(FRAME))

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> SoundSteps:
        """Builds the steps from the map "sound" of preprocess.json.

        Raises:
            BadSound: A value cannot be used.
        """
        try:
            made = cls(**{key: values[key] for key in KEYS if key in values})
        except (TypeError, ValueError, MemoryError, KeyError) as error:
            raise BadSound(f"preprocessor settings that cannot be used ({' '.join(str(error).split())[:120]})") from error
        return made

    @property
    def shape(self) -> tuple[int, int] | None:
        """(frames, filters) of a spectrogram; None for waveforms, whose length depends on the sound."""
        return (self.max_length, self.num_mel_bins) if self.kind == "spectrogram" else None

    def __call__(self, data: bytes, longest: int = 0) -> NDArray[np.float32]:
        """Returns the waveform float32 [T], or the spectrogram float32 [frames, filters], of one file.

        Args:
            data: The encoded file.
            longest: Samples that are read of a waveform, from its beginning; 0 for all.

        Raises:
            BadSound: See `read_sound`.
        """
        samples = resampled(*read_sound(data), self.sampling_rate)
        if self.kind == "spectrogram":
            return self._spectrogram(samples)
        samples = samples[:longest] if longest else samples
        samples = np.pad(samples, (0, max(0, self.least - len(samples))))
        if not self.do_normalize:
            return samples
        normalized: NDArray[np.float32] = (samples - samples.mean()) / np.sqrt(samples.var() + VARIANCE_FLOOR)
        return normalized

    def samples(self, data: bytes, longest: int = 0) -> int:
        """Returns the samples of the waveform of a file, only from its header; see `__call__`.

        Raises:
            BadSound: The file has no header that can be read.
        """
        import soundfile

        try:
            with soundfile.SoundFile(io.BytesIO(data)) as file:
                count = -(-int(file.frames) * self.sampling_rate // int(file.samplerate))
        except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError, OSError) as error:
            raise BadSound("not a readable sound; a whole WAV or FLAC file is allowed") from error
        return max(min(count, longest) if longest else count, self.least)

    def frames(self, samples: int) -> int:
        """Returns the frames that a model makes of a waveform: floor((n - kernel) / stride) + 1 for each of its convolutions."""
        for kernel, stride in self.strides:
            samples = (samples - kernel) // stride + 1
        return samples

    def _spectrogram(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        logs = log_mel(samples[: FRAME + HOP * (self.max_length - 1)], self.window, self.filters)
        made = np.zeros((self.max_length, self.num_mel_bins), np.float32)
        made[: len(logs)] = logs
        return (made - np.float32(self.mean)) / np.float32(self.std * 2) if self.do_normalize else made


def log_mel(samples: NDArray[np.float32], window: NDArray[np.float64], filters: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the log-mel energies of all whole frames of a sound, float64 [frames, filters]; [0, filters] where it is shorter than one.

    Args:
        samples: Float32 [T].
        window: Float64 [400].
        filters: Float64 [257, filters].
    """
    if len(samples) < FRAME:
        return np.zeros((0, filters.shape[1]))
    frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float64), FRAME)[::HOP]
    frames = frames - frames.mean(axis=1, keepdims=True)
    emphasized = np.concatenate([frames[:, :1] * (1 - PRE_EMPHASIS), frames[:, 1:] - PRE_EMPHASIS * frames[:, :-1]], axis=1)
    spectrum = np.fft.rfft(emphasized * window, POINTS).astype(np.complex64)
    power = np.abs(spectrum, dtype=np.float64) ** 2
    energies: NDArray[np.float64] = np.log(np.maximum(power @ filters, ENERGY_FLOOR))
    return energies


def mel_filters(number: int, rate: int) -> NDArray[np.float64]:
    """Returns triangles on Kaldi's mel scale, mel(f) = 1127 ln(1 + f / 700), over the bins of the spectrum, float64 [257, number].

    Args:
        number: Number of triangles, evenly spaced from 20 Hz to half the rate.
        rate: Samples per second.
    """
    lowest, highest = (1127.0 * np.log(1.0 + hertz / 700.0) for hertz in (LOWEST_HZ, rate // 2))
    centres = np.linspace(lowest, highest, number + 2)
    bins = 1127.0 * np.log(1.0 + rate / POINTS * np.arange(POINTS // 2 + 1) / 700.0)
    widths, slopes = np.diff(centres), centres[None] - bins[:, None]
    made: NDArray[np.float64] = np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return made


@dataclass(frozen=True)
class Sounds:
    """Prepares rows of sounds for one checkpoint."""

    steps: SoundSteps
    """Steps that are applied to each row."""
    input_names: tuple[str, ...]
    """Names of the model's inputs: `input_values`, and `attention_mask` where the model takes a mask of padding."""
    max_length: int
    """Samples of the longest waveform; 0 for spectrograms."""
    buckets: tuple[int, ...]
    """Lengths (samples) that waveforms are padded to, ascending; the last is max_length. () for spectrograms."""

    def prepared(self, rows: Sequence[Any]) -> list[NDArray[np.float32]]:
        """Returns for each encoded file its waveform float32 [T], or its spectrogram float32 [frames, filters].

        Raises:
            BadSound: A row is not of type bytes, or cannot be read; the message names it.
        """
        made = []
        for index, row in enumerate(rows):
            if not isinstance(row, bytes):
                raise BadSound(f"row {index}: {type(row).__name__} given; the bytes of a WAV or FLAC file are allowed")
            try:
                made.append(self.steps(row, self.max_length))
            except BadSound as error:
                raise BadSound(f"row {index}: {error}") from error
        return made

    def encode(self, rows: Sequence[NDArray[np.float32]], length: int | None = None) -> dict[str, NDArray[Any]]:
        """Returns prepared rows as one batch: `input_values` float32 [n, L] or [n, frames, filters], and `attention_mask` int64 [n, L].

        Args:
            rows: What `prepared` gave.
            length: Samples to pad waveforms to; 0 pads to the longest row, None to the smallest bucket that fits it.

        Raises:
            ValueError: A row is longer than `length`.
        """
        if not self.buckets:
            return {self.input_names[0]: np.stack(rows) if rows else np.zeros((0, *(self.steps.shape or ())), np.float32)}
        longest = max(map(len, rows), default=0)
        if length is None:
            length = next(bucket for bucket in self.buckets if bucket >= longest)
        elif length and longest > length:
            raise ValueError(f"a row of {longest} samples does not fit into {length}")
        values = np.zeros((len(rows), length or longest), np.float32)
        mask = np.zeros(values.shape, np.int64)
        for index, row in enumerate(rows):
            values[index, : len(row)], mask[index, : len(row)] = row, 1
        return dict(zip(self.input_names, (values, mask), strict=False))

    def groups(self, rows: Sequence[NDArray[np.float32]]) -> dict[int, list[int]]:
        """Groups prepared rows by the smallest bucket that fits them, buckets ascending; `{0: all}` for spectrograms."""
        if not self.buckets:
            return {0: list(range(len(rows)))} if rows else {}
        fitting = np.array(self.buckets)[np.searchsorted(self.buckets, [len(row) for row in rows])] if rows else np.zeros(0)
        return {bucket: np.flatnonzero(fitting == bucket).tolist() for bucket in self.buckets if (fitting == bucket).any()}

    def frames(self, rows: Sequence[bytes]) -> list[int]:
        """Returns the frames of each encoded file that count: the frames of the sound, or of its bucket where a model takes no mask of what
        is padding, and was trained with it."""
        lengths = [self.steps.samples(row, self.max_length) for row in rows]
        if len(self.input_names) == 1:
            lengths = [next(bucket for bucket in self.buckets if bucket >= length) for length in lengths]
        return [self.steps.frames(length) for length in lengths]

    def batches(self, rows: Sequence[Any], batch_size: int) -> Iterator[tuple[list[int], dict[str, NDArray[Any]]]]:
        """Yields (row indices, prepared batch), all of one bucket; every row exactly once. Few rows are in memory at a time."""
        for first in range(0, len(rows), AT_ONCE):
            made = self.prepared(rows[first : first + AT_ONCE])
            for bucket, members in self.groups(made).items():
                for start in range(0, len(members), batch_size):
                    chosen = members[start : start + batch_size]
                    yield [first + place for place in chosen], self.encode([made[place] for place in chosen], bucket)
