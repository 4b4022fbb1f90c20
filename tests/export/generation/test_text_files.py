"""Files that the text of a decoder is read from: those of OpenVINO GenAI lie there only where they say what tokenizer.json says."""

from __future__ import annotations

from pathlib import Path

import openvino_genai
import pytest
from openvino_tokenizers import convert_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from export.generation.text_files import DETOKENIZER, TOKENIZER, write_graphs, write_text_files
from foundation.models.folder import Checkpoint
from foundation.standalone.language_text import LanguageText
from tests.foundation.standalone.test_language_text import digits_apart

pytestmark = pytest.mark.whole

PLAIN = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"
APART = '{{ "\\"<b>\\"" | tojson }}{% for m in messages %}{{ m.content.split("\\n")[0] | title }}{{ m | tojson }}{% endfor %}'
"""A template that OpenVINO GenAI does not render as Transformers does."""


def whole_numbers() -> Tokenizer:
    """A byte-level tokenizer that the converter knows."""
    made = digits_apart()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def unknown() -> Tokenizer:
    """A tokenizer with a step that the converter does not know."""
    made = Tokenizer(models.BPE({letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.UnicodeScripts(), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    return made


def checkpoint(folder: Path, tokenizer: Tokenizer, template: str | None = None) -> Path:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("tokenizer", "template", "reason"),
    [
        (whole_numbers, None, None),
        (whole_numbers, PLAIN, None),
        (digits_apart, None, "other ids for "),
        (unknown, None, "openvino_tokenizers does not convert it (Pre-tokenizer type 'UnicodeScripts'"),
        (whole_numbers, APART, "renders the chat template to another prompt"),
    ],
    ids=["plain", "chat", "digits", "unknown", "template"],
)
def test_graphs_that_say_something_else_are_left_out(tokenizer, template, reason, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source, folder = checkpoint(tmp_path / "source", tokenizer(), template), tmp_path / "folder"
    folder.mkdir()
    text = write_text_files(Checkpoint(source), folder)
    assert text.encode("x  1") == LanguageText.load(folder).encode("x  1")
    assert text.has_template == (template is not None)
    found = write_graphs(Checkpoint(source), folder)
    graphs = {TOKENIZER, DETOKENIZER} & {file.name for file in folder.iterdir()}
    if reason is None:
        assert found is None
        assert graphs == {TOKENIZER, DETOKENIZER}
    else:
        assert found is not None
        assert reason in found
        assert not graphs
        assert not list(folder.glob("openvino_*"))


def test_the_converter_still_gives_other_ids_where_digits_stand_alone(tmp_path: Path) -> None:
    """Asks the library: once this fails, its graphs can be written for such tokenizers again, which `write_graphs` then does by itself."""
    import openvino

    known = PreTrainedTokenizerFast(tokenizer_object=digits_apart())
    openvino.save_model(convert_tokenizer(known), tmp_path / TOKENIZER)
    converted = openvino_genai.Tokenizer(str(tmp_path)).encode("the    12 men", add_special_tokens=True).input_ids.data
    assert converted.reshape(-1).tolist() != known("the    12 men")["input_ids"]
