"""What a served model is asked as text and as messages, and that a server which reads or writes text otherwise does not pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openvino_tokenizers import convert_tokenizer
from transformers import PreTrainedTokenizerFast

from export.generation.text_files import TOKENIZER
from foundation.artifacts.artifact import write_json
from foundation.measure.probes import CHATS, PROBES
from foundation.models.inputs.language import of_transformers
from foundation.standalone.language_text import SETTINGS, LanguageText
from tests.foundation.standalone.test_language_text import digits_apart
from triton_repo.client import ServedWrong
from triton_repo.generation.text_check import ANSWER_TOKENS, Ask, Reply, check_texts

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}A:"
ROWS = [np.array(digits_apart().encode(text).ids, np.int32) for text in ("men  5", "women ran", "in 1999")]
MOST = 200
Encode = Callable[[str, bool], list[int]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    known = PreTrainedTokenizerFast(tokenizer_object=digits_apart(), bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    known.save_pretrained(tmp_path)
    write_json(tmp_path / SETTINGS, asdict(of_transformers(known).settings))
    return tmp_path


def server(text: LanguageText, encode: Encode | None = None, asked: list[Any] | None = None) -> Ask:
    """A server whose answers depend on the ids of the prompt alone."""

    def ask(prompt: Mapping[str, Any]) -> Reply:
        if asked is not None:
            asked.append(prompt)
        own = encode or (lambda given, special: text.encode(given, add_special_tokens=special))
        if "text" in prompt:
            ids = own(prompt["text"], True)
        elif "messages" in prompt:
            ids = own(text.apply_chat_template(prompt["messages"]), False)
        else:
            ids = list(prompt["ids"])
        tokens = np.random.default_rng(ids).integers(2, 300, ANSWER_TOKENS).tolist()
        return Reply(len(ids), tokens, text.decode(tokens))

    return ask


def test_texts_and_conversations_are_asked_in_both_spellings(folder: Path) -> None:
    asked: list[Any] = []
    count = check_texts("m", folder, ROWS, MOST, chats=True, ask=server(LanguageText.load(folder), asked=asked))
    assert count == len(PROBES) + len(ROWS) + len(CHATS) == len(asked) // 2
    assert [one["text"] for one in asked if "text" in one] == [*PROBES, "men  5", "women ran", "in 1999"]
    assert [one["messages"] for one in asked if "messages" in one] == [list(messages) for messages in CHATS]
    known = PreTrainedTokenizerFast.from_pretrained(folder)
    assert [one["ids"] for one in asked[1::2]][: len(PROBES)] == [known(text)["input_ids"] for text in PROBES]


def test_an_encoder_decoder_is_asked_no_conversation_and_nothing_that_it_has_no_room_for(folder: Path) -> None:
    asked: list[Any] = []
    count = check_texts("m", folder, ROWS, 12, chats=False, ask=server(LanguageText.load(folder), asked=asked))
    assert 0 < count < len(PROBES) + len(ROWS)
    assert not [one for one in asked if "messages" in one]
    assert max(len(one["ids"]) for one in asked if "ids" in one) <= 12


def test_a_server_that_tokenizes_by_the_converted_graph_does_not_pass(folder: Path, tmp_path: Path) -> None:
    import openvino
    import openvino_genai

    openvino.save_model(convert_tokenizer(PreTrainedTokenizerFast.from_pretrained(folder)), tmp_path / TOKENIZER)
    converted = openvino_genai.Tokenizer(str(tmp_path))

    def encode(text: str, special: bool) -> list[int]:
        ids: list[int] = converted.encode(text, add_special_tokens=special).input_ids.data.reshape(-1).tolist()
        return ids

    with pytest.raises(ServedWrong, match=r"model m in Triton: .* otherwise than Transformers"):
        check_texts("m", folder, ROWS, MOST, chats=True, ask=server(LanguageText.load(folder), encode))


def test_a_server_without_the_start_token_or_with_another_template_or_decoder_does_not_pass(folder: Path) -> None:
    text = LanguageText.load(folder)
    with pytest.raises(ServedWrong, match="is read otherwise"):
        check_texts(
            "m", folder, ROWS, MOST, chats=True, ask=server(text, lambda given, special: text.encode(given, add_special_tokens=False))
        )
    other = LanguageText(text.tokenizer, replace(text.settings, chat_template=TEMPLATE.replace(" | trim", "")))
    with pytest.raises(ServedWrong, match=r"'role': 'system'.* is read otherwise"):
        check_texts("m", folder, ROWS, MOST, chats=True, ask=server(other))
    ask = server(text)
    with pytest.raises(ServedWrong, match=r"are written as '.*x'; Transformers writes"):
        check_texts("m", folder, ROWS, MOST, chats=True, ask=lambda prompt: replace(ask(prompt), text=ask(prompt).text + "x"))


def test_conversations_that_the_template_refuses_are_left_out(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}"
    )
    known = PreTrainedTokenizerFast.from_pretrained(folder)
    write_json(folder / SETTINGS, asdict(of_transformers(known).settings))
    count = check_texts("m", folder, ROWS, MOST, chats=True, ask=server(LanguageText.load(folder)))
    assert count == len(PROBES) + len(ROWS) + 1
