"""Reads generation_config.json of a model, and runs Transformers' `generate` with only the caller's settings.

Its token ids apply (`foundation.core.answer_tokens`). All else changes which tokens are chosen. Transformers applies that unless each
setting is given another value, and no engine can do all of it, so none applies it: answers follow a `Decoding`, and `idle` names what
is left out. Most tokens of an answer are not named, since every request says how many it takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from foundation.core.answer_tokens import FILE, SHOWN, AnswerTokens, read
from foundation.core.decoding import NO_TOKEN
from foundation.models.folder import Checkpoint
from foundation.models.library import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLING: Mapping[str, object] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Sampling settings that `Decoding` has too, with their neutral values; without do_sample Transformers applies none of them."""
RARE_SAMPLING: Mapping[str, object] = {"top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
REQUESTS: Mapping[str, object] = {
    "repetition_penalty": 1.0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "length_penalty": 1.0,
    "stop_strings": None,
}
"""Settings that `Decoding` has under this or another name, with their neutral values."""
UNSUPPORTED: Mapping[str, object] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_decoder_ids": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "penalty_alpha": 0.0,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "sequence_bias": None,
    "suppress_tokens": None,
    "token_healing": False,
    "watermarking_config": None,
}
"""Settings that none of our engines implements, with their neutral values."""
NEUTRAL: Mapping[str, object] = {"do_sample": False, **SAMPLING, **RARE_SAMPLING, **REQUESTS, **UNSUPPORTED}


def answer_tokens(model: PreTrainedModel) -> AnswerTokens:
    """Returns the generation settings that Transformers has read for a model."""
    return AnswerTokens.of(_inside(model).generation_config.to_dict())


def settings_of(folder: Path) -> dict[str, Any]:
    """Returns the generation settings in the file of a folder; without one, the settings that Transformers takes from config.json.

    Raises:
        InputError: The file is damaged.
    """
    from transformers import GenerationConfig

    file = folder / FILE
    if not file.is_file():
        with quiet():
            derived: dict[str, Any] = GenerationConfig.from_model_config(Checkpoint(folder).config).to_dict()
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return {**derived, **{name: raw[name] for name in NEUTRAL if name in raw}}  # older folders keep them there
    return read(file)


def idle(settings: Mapping[str, object]) -> str | None:
    """Returns in one line what settings ask for and answers leave out; None where that is nothing."""
    samples = settings.get("do_sample") is True
    given = {name: settings[name] for name in (*REQUESTS, *(SAMPLING if samples else ())) if _asks(settings, name)}
    if samples:
        given = {"do_sample": True, **given}
    never = {name: settings[name] for name in (*UNSUPPORTED, *(RARE_SAMPLING if samples else ())) if _asks(settings, name)}
    parts = []
    if given:
        parts.append(f"{_listed(given)} (applied only where a request or compress generate gives it)")
    if never:
        parts.append(f"{_listed(never)} (no engine does it)")
    return f"{FILE} asks for {' and '.join(parts)}: answers take the most likely tokens without it" if parts else None


def noted(folder: Path) -> tuple[str, ...]:
    """Returns the settings in the file of a folder that answers ignore, in a line.

    Raises:
        InputError: The file is damaged.
    """
    settings = settings_of(folder)
    AnswerTokens.of(settings)
    line = idle(settings)
    return () if line is None else (line,)


def _asks(settings: Mapping[str, object], name: str) -> bool:
    value = settings.get(name)
    return value is not None and value != [] and value != NEUTRAL[name]


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {json.dumps(value, default=str)[:SHOWN]}" for name, value in values.items())


def generate(model: PreTrainedModel, ends: Sequence[int], settings: Mapping[str, object], **inputs: Any) -> Tensor:
    """Returns the answers of Transformers' `generate` with these settings, int64 [n, L].

    Of the model's own settings its start token and the first token of an encoder-decoder's answers apply, nothing else.

    Args:
        model: A model of Transformers in evaluation mode.
        ends: Tokens that end an answer.
        settings: In the words of Transformers.
        inputs: Inputs of the model, and what is not a setting, such as a streamer.
    """
    from transformers import GenerationConfig
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    inner = _inside(model)
    own, encodes = inner.generation_config, bool(inner.config.is_encoder_decoder)
    neutral = {"do_sample": False, **SAMPLING, "use_cache": True, "pad_token_id": 0, "eos_token_id": list(ends) or [NO_TOKEN]}
    if encodes:
        tokens, start = answer_tokens(model), getattr(inner.config, "decoder_start_token_id", None)
        neutral |= {"decoder_start_token_id": tokens.start if start is None else start, "forced_bos_token_id": tokens.first}
        # Transformers makes one of as many layers as the encoder has
        inputs.setdefault("past_key_values", EncoderDecoderCache(DynamicCache(), DynamicCache()))
    asked = GenerationConfig(**{**neutral, **settings})
    inner.generation_config = GenerationConfig()  # what is None in `asked` would be taken from the model
    try:
        found: Tensor = model.generate(generation_config=asked, **inputs)
    finally:
        inner.generation_config = own
    return found


def _inside(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model inside of a compiled one."""
    return getattr(model, "_orig_mod", model)
