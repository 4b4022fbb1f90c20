"""generation_config.json of a model: its tokens apply everywhere, all else nowhere, and what is left out is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from export.engines.torch import in_transformers
from foundation.core.answer_tokens import AnswerTokens
from foundation.core.decoding import Decoding
from foundation.core.errors import InputError
from foundation.models.generation import NEUTRAL, answer_tokens, generate, idle, noted, settings_of
from tests.export.generation.tiny_decoders import decoder
from tests.export.generation.tiny_encoder_decoders import encoder_decoder

OWN: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.1,
    "top_k": 3,
    "top_p": 0.2,
    "min_p": 0.5,
    "typical_p": 0.3,
    "epsilon_cutoff": 0.02,
    "repetition_penalty": 4.0,
    "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1,
    "min_new_tokens": 9,
    "bad_words_ids": [[9], [40]],
    "suppress_tokens": list(range(20, 60)),
    "begin_suppress_tokens": [3],
    "forced_eos_token_id": 2,
    "num_beams": 3,
    "length_penalty": 9.0,
    "early_stopping": True,
    "num_return_sequences": 2,
    "exponential_decay_length_penalty": [1, 5.0],
    "renormalize_logits": True,
    "sequence_bias": [[[7], 9.0]],
    "max_length": 30,
}
"""What changes answers."""
IDS = torch.tensor([[5, 9, 11, 60]])


def answers(model: Any, decoding: Decoding, ends: tuple[int, ...] = ()) -> list[list[int]]:
    torch.manual_seed(decoding.seed)
    with torch.inference_mode():
        found: list[list[int]] = generate(
            model, ends, in_transformers(decoding), input_ids=IDS, attention_mask=torch.ones_like(IDS)
        ).tolist()
    return found


@pytest.mark.parametrize("encodes", [False, True])
def test_answers_do_not_depend_on_settings_of_the_model(encodes: bool) -> None:
    model: Any = encoder_decoder("bart") if encodes else decoder("llama")
    cases = (Decoding(max_tokens=12), Decoding(max_tokens=12, temperature=1.0, seed=3), Decoding(max_tokens=12, beams=3, answers=2))
    before = [answers(model, case) for case in cases]
    model.generation_config = own = GenerationConfig(**OWN, eos_token_id=2, decoder_start_token_id=0)
    assert [answers(model, case) for case in cases] == before
    assert model.generation_config is own
    kept = own.to_dict()
    assert all(kept[name] == (value if name != "sequence_bias" else kept[name]) for name, value in OWN.items())


def test_the_end_tokens_end_an_answer_and_the_first_token_of_a_language_is_forced() -> None:
    model: Any = encoder_decoder("mbart")
    tokens = answer_tokens(model)
    assert tokens == AnswerTokens(ends=(2,), start=0, first=5)
    whole = answers(model, Decoding(max_tokens=12))[0]
    assert whole[:2] == [0, 5]
    ended = answers(model, Decoding(max_tokens=12), (whole[4],))[0]
    assert ended == whole[: 1 + whole.index(whole[4], 1)]


def test_settings_that_change_answers_are_named_by_whether_a_request_can_give_them() -> None:
    line = idle(OWN)
    assert line is not None
    given, never = line.split("gives it) and ")
    for name in ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_beams", "length_penalty"):
        assert name in given, name
    for name in ("no_repeat_ngram_size", "suppress_tokens", "bad_words_ids", "early_stopping", "forced_eos_token_id", "typical_p"):
        assert name in never, name
    assert "min_length" not in line
    assert idle({"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2], "max_length": 20}) is None  # not applied without do_sample
    assert idle({"do_sample": True, "top_k": 0, "suppress_tokens": []}) is not None
    assert idle(GenerationConfig().to_dict()) is None
    assert idle(NEUTRAL) is None


def test_every_setting_of_the_library_is_known() -> None:
    """One that Transformers adds is either named or known to choose no token."""
    lengths = {"max_length", "max_new_tokens", "max_time"}
    tokens = {"bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id", "pad_token_id"}
    speed = {name for name in vars(GenerationConfig()) if "assistant" in name or "cache" in name or "lookup" in name or "compile" in name}
    speed |= {
        "speculation_type",
        "continuous_batching_config",
        "prefill_chunk_size",
        "use_mtp",
        "max_matching_ngram_size",
        "low_memory",
        "target_lookbehind",
    }
    output = {name for name in vars(GenerationConfig()) if name.startswith(("output_", "return_", "_")) or name == "transformers_version"}
    unknown = vars(GenerationConfig()).keys() - NEUTRAL.keys() - lengths - tokens - speed - output
    assert not unknown, sorted(unknown)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "a JSON object is expected"),
        ("{", "not JSON"),
        ('{"eos_token_id": "2"}', 'eos_token_id: "2" given; a token id, a list of them or null'),
        ('{"eos_token_id": [1, -2]}', "eos_token_id: [1, -2] given"),
        ('{"forced_bos_token_id": true}', "forced_bos_token_id: true given; a token id or null"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(InputError) as caught:
        noted(tmp_path)
    assert words in str(caught.value)


def test_without_the_file_config_json_speaks(tmp_path: Path) -> None:
    settings = {"model_type": "bart", "eos_token_id": 2, "decoder_start_token_id": 2, "no_repeat_ngram_size": 3, "num_beams": 4}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert AnswerTokens.of(settings_of(tmp_path)).ends == (2,)
    line = idle(settings_of(tmp_path))
    assert line is not None
    assert "no_repeat_ngram_size 3" in line
