"""Questions in the chat format of a model: what it reads, and that answers end where Transformers ends them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer, GenerationConfig

from export.choices import Generation
from export.export import Export
from export.generation.prompts import Prompts, greedy
from export.generation.questions import KEY, prompts_of
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.measure.tokens import ENDED, load_answers, save_answers
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.models.inputs.language import of_transformers
from foundation.models.inputs.questions import MOST_BYTES, encode_question, read_questions
from tests.export.generation.genai_checkpoints import checkpoint, prompts, tokenizer
from tests.export.generation.test_agreement import context
from tests.export.generation.tiny_decoders import VOCABULARY
from tests.foundation import tiny_gpt

pytestmark = pytest.mark.usefixtures("engines_inside")

TEMPLATE = "{% for message in messages %}q{{ message.content }}z{% endfor %}{% if add_generation_prompt %}a{% endif %}"
ENDS = tuple(range(30, VOCABULARY, 3))
"""Ids that end an answer: many, so that random models meet them."""


def chatting(kind: str, folder: Path) -> Path:
    """Returns a copy of a checkpoint whose tokenizer has a chat template, and whose answers end."""
    shutil.copytree(checkpoint(kind), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    GenerationConfig(eos_token_id=list(ENDS)).save_pretrained(folder)
    return folder


def test_lines_that_are_not_blank_are_read(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("\n  What is it? \r\n\nWäre es möglich?\n")
    assert read_questions(str(tmp_path / "q.txt"), KEY) == ("What is it?", "Wäre es möglich?")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"q.txt given, which cannot be read \(.*\); give a UTF-8 file with one question a line"),
        (b"\xff\xfe", "q.txt given, which cannot be read"),
        (b"", "q.txt given, which has no question in it"),
        (b" \n\n", "q.txt given, which has no question in it"),
        (b"a" * (MOST_BYTES + 1), "at most 10000000 are allowed"),
    ],
    ids=["missing", "not UTF-8", "empty", "blank", "large"],
)
def test_a_file_that_holds_no_questions_is_one_line(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "q.txt").write_bytes(content)
    with pytest.raises(InputError, match=f"export.generation.questions: .*{message}"):
        read_questions(str(tmp_path / "q.txt"), KEY)


def test_a_question_goes_through_the_chat_template() -> None:
    plain = tokenizer()
    assert encode_question(of_transformers(plain), "cd").tolist() == plain("cd")["input_ids"]
    plain.chat_template = TEMPLATE
    assert encode_question(of_transformers(plain), "cd").tolist() == [ord(letter) - ord("a") for letter in "qcdza"]
    assert encode_question(of_transformers(plain), "cd", chat=False).tolist() == plain("cd")["input_ids"]
    plain.chat_template = "{{ raise_exception('Questions in pairs, please.') }}"
    with pytest.raises(InputError, match=r"Questions in pairs, please\."):
        encode_question(of_transformers(plain), "cd")


def test_a_question_without_room_for_its_answer_is_one_line(tmp_path: Path) -> None:
    folder = chatting("gpt2", tmp_path / "model")
    assert [len(ids) for ids in prompts_of(Checkpoint(folder), ("cd", "c"), 5, 10)] == [5, 4]
    with pytest.raises(InputError, match=r"cd .* 5 tokens, .* 6; .* 10: give shorter questions, or fewer"):
        prompts_of(Checkpoint(folder), ("c", "cd"), 6, 10)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_answers_in_torch_end_where_those_of_transformers_do(kind: str, tmp_path: Path) -> None:
    model: Any = load_float(chatting(kind, tmp_path / "model"))
    rows = prompts((5, 3, 5, 9, 5), seed=4)
    found = greedy(model, Prompts(tuple(rows), 24, questions=True))
    assert (found == ENDED).any()
    for row, answer in zip(rows, found, strict=True):  # one at a time, by Transformers
        with torch.no_grad():
            ids = torch.from_numpy(row.astype(np.int64))[None]
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0)
        expected = whole[0, len(row) :].tolist()
        assert answer[answer != ENDED].tolist() == expected
        assert len(expected) == 24 or expected[-1] in ENDS


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows, tokens = prompts((2, 5)), np.array([[4, ENDED], [7, 8]], np.int32)
    save_answers(tmp_path / "answers.safetensors", rows, tokens)
    again, kept = load_answers(tmp_path / "answers.safetensors")
    assert [row.tolist() for row in again] == [row.tolist() for row in rows]
    np.testing.assert_array_equal(kept, tokens)


def test_the_stage_depends_on_the_questions(tmp_path: Path) -> None:
    file, given = tmp_path / "q.txt", context("gpt2", tmp_path)
    file.write_text("one\n")
    stage = Export(generation=Generation(questions=str(file)))
    before = stage.depends(given)
    file.write_text("one\n\n")
    assert stage.depends(given) == before
    file.write_text("another\n")
    assert stage.depends(given) != before
    assert Export().depends(given) is None


@pytest.mark.slow
@pytest.mark.whole
def test_an_engine_is_asked_the_questions(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_gpt.checkpoint("gpt2"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    GenerationConfig(eos_token_id=list(range(1, tiny_gpt.VOCABULARY, 2))).save_pretrained(folder)
    (tmp_path / "q.txt").write_text("".join(f"{word}\n" for word in ("sea", "gold", "the king", "men", "old ship")))
    given, out = context("gpt2", tmp_path), tmp_path / "out"
    given.checkpoints["baseline"] = Artifact(folder, {"id": "baseline", "digest": "", "parents": []})  # type: ignore[index]
    out.mkdir()
    Export(generation=Generation(questions=str(tmp_path / "q.txt"), prompts=4, tokens=5), float_precision="fp32").run(
        given.baseline, given, out
    )
    (entry,) = json.loads((out / "export.json").read_text())["builds"][0]["engines"]
    generation = entry["generation"]
    assert generation["questions"]
    assert generation["baseline"]["identical"] == generation["torch"]["identical"] == generation["baseline"]["prompts"] == 4
    rows, tokens = load_answers(out / generation["file"])
    known = AutoTokenizer.from_pretrained(folder)
    assert [known.decode(row) for row in rows] == ["qseaza", "qgoldza", "qmenza", "qold shipza"]
    assert (load_file(out / generation["file"])["tokens"] == ENDED).any()
    assert (tokens == ENDED).any()
