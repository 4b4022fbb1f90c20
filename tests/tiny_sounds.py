"""Tiny data sets of sounds and models of them, from random weights: what whole runs on audio are tested with."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

RATE = 8000
CLASSES = ("high", "low", "noise")


def wave(kind: str, seconds: float, random: np.random.Generator) -> np.ndarray:
    """Returns float32 [T]: a tone of a high or low pitch, or noise."""
    time = np.arange(int(seconds * RATE)) / RATE
    pitch = {"high": 1500, "low": 300}.get(kind)
    clean = random.standard_normal(len(time)) if pitch is None else np.sin(2 * np.pi * pitch * random.uniform(0.9, 1.1) * time)
    return (0.3 * clean + 0.02 * random.standard_normal(len(time))).astype(np.float32)


def encoded(samples: np.ndarray, rate: int = RATE, form: str = "WAV", subtype: str = "PCM_16") -> bytes:
    """Returns the bytes of a file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype, format=form)
    return file.getvalue()


def folder(where: Path, train: int = 60, test: int = 40, longest: float = 0.12) -> Path:
    """Writes split/CLASS/N.wav or .flac, of 0.06 seconds to `longest`; returns the folder."""
    random = np.random.default_rng(0)
    for split, count in {"train": train, "test": test}.items():
        for index in range(count):
            kind, form = CLASSES[index % len(CLASSES)], ("wav", "flac")[index % 2]
            file = where / split / kind / f"{index}.{form}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(wave(kind, random.uniform(0.06, longest), random), form=form.upper()))
    return where


def waveform_config(kind: str = "wav2vec2", layers: int = 1, masked: bool = False) -> dict[str, Any]:
    """Returns the config of a model of waveforms: 40 samples a frame."""
    return {
        "model_type": kind,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "conv_dim": [32, 32],  # of 16 channels OpenVINO computes wrong int8 sums on processors with AMX: its parity gate says so
        "conv_kernel": [16, 8],
        "conv_stride": [8, 5],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "classifier_proj_size": 32,
        "feat_extract_norm": "layer" if masked else "group",
        "do_stable_layer_norm": masked,
        "final_dropout": 0.0,
        "hidden_dropout": 0.0,
        "feat_proj_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def spectrogram_config(layers: int = 1) -> dict[str, Any]:
    """Returns the config of a model of spectrograms: 4 frames of 16 filters."""
    return {
        "model_type": "audio-spectrogram-transformer",
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "patch_size": 4,
        "frequency_stride": 4,
        "time_stride": 4,
        "max_length": 4,
        "num_mel_bins": 16,
    }


def model(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the section `model` of a recipe: random weights, sounds of 8 kHz."""
    return {"config": config, "init": "random", "task": "audio-classification", "head": "new", "preprocessor": {"sampling_rate": RATE}}
