"""Input of an audio model, read off the structure of its config: waveforms of any length, or spectrograms of one size.

waveform      Wav2Vec2, HuBERT and their relatives: convolutions over the samples (`conv_kernel`, `conv_stride`)
spectrogram   AST: patches of `max_length` frames by `num_mel_bins` filters
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundation.artifacts.safetensors import read_json
from foundation.core.errors import InputError, Problem
from foundation.core.shown import reason, shown
from foundation.models.library import REFUSED
from foundation.standalone.sound import RATES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SAMPLING_RATE = 16000
WAVEFORM, SPECTROGRAM = "Wav2Vec2FeatureExtractor", "ASTFeatureExtractor"
SETTINGS = "preprocessor_config.json"
INPUT = "input_values"


def reads_sounds(config: PreTrainedConfig) -> bool:
    """Whether a model of this config reads waveforms or spectrograms."""
    return spectrogram_shape(config) is not None or _strides(config) is not None


def spectrogram_shape(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Returns frames and filters of the spectrograms that a model reads; None for a model that reads none."""
    if any(getattr(config, name, None) is None for name in ("max_length", "num_mel_bins", "patch_size")):
        return None
    return int(config.max_length), int(config.num_mel_bins)


def least_samples(config: PreTrainedConfig) -> int:
    """Returns the samples of the shortest waveform that gives a frame; 0 for a model of spectrograms."""
    length = 1
    for kernel, stride in reversed(_strides(config) or []):
        length = (length - 1) * stride + kernel
    return length if _strides(config) else 0


def frames_of(config: PreTrainedConfig, samples: int) -> int:
    """Returns the frames that a model makes of a waveform."""
    for kernel, stride in _strides(config) or []:
        samples = (samples - kernel) // stride + 1
    return samples


def _strides(config: PreTrainedConfig) -> list[tuple[int, int]] | None:
    kernels, strides = getattr(config, "conv_kernel", None), getattr(config, "conv_stride", None)
    return None if not isinstance(kernels, list | tuple) or not strides else list(zip(kernels, strides, strict=True))


def settle(config: PreTrainedConfig) -> PreTrainedConfig:
    """Turns off, in place, what a model of waveforms draws while it trains besides its dropout; returns the config.

    SpecAugment draws from numpy's global generator, which a training that was interrupted cannot repeat, and refuses sounds shorter than
    its masks; a layer that is skipped at random has no states that a student could learn.
    """
    for name, value in (("apply_spec_augment", False), ("layerdrop", 0.0)):
        if _strides(config) is not None and hasattr(config, name):
            setattr(config, name, value)
    return config


def sound_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns a plain preprocessor_config.json for a model.

    Raises:
        InputError: The model reads neither waveforms nor spectrograms.
    """
    _check(config, "model.config")
    shape = spectrogram_shape(config)
    if shape is not None:
        return {"feature_extractor_type": SPECTROGRAM, "sampling_rate": SAMPLING_RATE, "max_length": shape[0], "num_mel_bins": shape[1]}
    masked = getattr(config, "feat_extract_norm", "group") == "layer"  # the others never saw a mask (Transformers' documentation)
    return {
        "feature_extractor_type": WAVEFORM,
        "sampling_rate": SAMPLING_RATE,
        "padding_value": 0.0,
        "do_normalize": True,
        "return_attention_mask": masked,
    }


def settings_of(folder: Path | None, config: PreTrainedConfig, overrides: Mapping[str, object] | None) -> dict[str, Any]:
    """Returns preprocessor_config.json of a recipe's model: from its folder, or a plain one, with the keys that the recipe gives.

    Raises:
        InputError: A folder lacks the file, or the model reads no sounds.
    """
    found = sound_settings(config) if folder is None else read_json(folder / SETTINGS, "model.path")
    return {**found, **(overrides or {})}


def sound_steps(settings: Mapping[str, object], config: PreTrainedConfig, where: str) -> dict[str, Any]:
    """Returns the map "sound" of preprocess.json, with all defaults of the feature extractor filled in, and `return_attention_mask`.

    Args:
        settings: Contents of preprocessor_config.json.
        config: Transformers config of the model.
        where: The file, for messages.

    Raises:
        InputError: The feature extractor is another one, pads otherwise, or does not fit the model.
    """
    import transformers

    _check(config, where)
    kind = settings.get("feature_extractor_type")
    if kind not in (WAVEFORM, SPECTROGRAM):
        raise InputError(where, f"feature_extractor_type {shown(kind)} given", f"{WAVEFORM} or {SPECTROGRAM} is allowed")
    try:
        values = getattr(transformers, kind)(**{key: value for key, value in settings.items() if key != "feature_extractor_type"}).to_dict()
    except REFUSED as error:
        raise InputError(where, f"cannot be used ({reason(error)})", remedy="save the feature extractor again") from error
    fixed = {"feature_size": 1, "padding_side": "right", "padding_value": 0.0}
    problems = [
        Problem(key, f"{shown(values.get(key))} given", f"{value} is allowed")
        for key, value in fixed.items()
        if values.get(key, value) != value
    ]
    rate = values["sampling_rate"]
    if isinstance(rate, bool) or not isinstance(rate, int) or not RATES[0] <= rate <= RATES[1]:
        problems.append(Problem("sampling_rate", f"{shown(rate)} given", f"{RATES[0]} to {RATES[1]} Hz are allowed"))
    if problems:
        raise InputError.of(problem.within(where) for problem in problems)
    steps = {key: values[key] for key in ("sampling_rate", "do_normalize", "return_attention_mask")}
    if kind == WAVEFORM:
        _fits(spectrogram_shape(config) is None, where, kind, config)
        return {"kind": "waveform", **steps, "least": least_samples(config)}
    size = values["max_length"], values["num_mel_bins"]
    _fits(spectrogram_shape(config) == size and not steps["return_attention_mask"], where, kind, config)
    return {"kind": "spectrogram", **steps, **{key: values[key] for key in ("num_mel_bins", "max_length", "mean", "std")}}


def _fits(fits: bool, where: str, kind: str, config: PreTrainedConfig) -> None:
    if not fits:
        shape = spectrogram_shape(config)
        reads = "waveforms" if shape is None else f"spectrograms of {shape[0]} frames with {shape[1]} mel bins, without a mask"
        raise InputError(
            where, f"{kind} does not fit this {config.model_type}, which reads {reads}", remedy="give its own preprocessor_config.json"
        )


def _check(config: PreTrainedConfig, where: str) -> None:
    if not reads_sounds(config):
        kinds = "convolutions over samples (Wav2Vec2, HuBERT) or patches of a mel spectrogram (AST)"
        raise InputError(where, f"a {config.model_type} does not read sounds in a way that is supported", f"{kinds} are")
