"""Prompt files: what a model is asked, and files that lack something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distill.labeller.prompts import Query, read_prompts, variants, writing_query
from foundation.core.errors import InputError
from tests.distill.labeller.tiny_labellers import EXAMPLES, LABELS, TEMPLATE, prompts
from tests.problems import raises_problem


def test_examples_come_before_the_text_and_spaces_belong_to_the_word(tmp_path: Path) -> None:
    file = read_prompts(prompts(tmp_path, examples=EXAMPLES[:2], separator="\n--\n"), LABELS, False, "prompt")
    [variant] = variants(file, LABELS, 1, 0)
    expected = (
        "Review: a great film that I love\nSentiment: good\n--\n"
        "Review: dull and poor from the first minute\nSentiment: bad\n--\n"
        "Review: so {label} {text}\nSentiment:"
    )
    assert variant.query("so {label} {text}") == Query(expected, " ")


def test_a_chat_has_examples_as_turns(tmp_path: Path) -> None:
    file = read_prompts(prompts(tmp_path, examples=EXAMPLES[2:], chat=True, system="Label."), LABELS, False, "prompt")
    [variant] = variants(file, LABELS, 1, 0)
    assert variant.query("dull").messages == [
        {"role": "system", "content": "Label."},
        {"role": "user", "content": "Review: fine\nSentiment:"},
        {"role": "assistant", "content": "good"},
        {"role": "user", "content": "Review: dull\nSentiment:"},
    ]


def test_a_pair_has_two_places(tmp_path: Path) -> None:
    pair = {"templates": ["{text} / {text_pair} -> {label}"], "examples": [{"text": "a", "text_pair": "b", "label": "negative"}]}
    file = read_prompts(prompts(tmp_path, **pair), LABELS, True, "prompt")
    [variant] = variants(file, LABELS, 1, 0)
    assert variant.query(("c", "d")).prompt == "a / b -> bad\n\nc / d ->"


def test_orders_are_distinct_and_the_same_every_time(tmp_path: Path) -> None:
    file = read_prompts(prompts(tmp_path, templates=[TEMPLATE, "{text} = {label}"], examples=EXAMPLES), LABELS, False, "prompt")
    found = variants(file, LABELS, 4, seed=5)
    assert [one.template for one in found] == [TEMPLATE] * 4 + ["{text} = {label}"] * 4
    assert len({tuple(example.text for example in one.examples) for one in found}) == 4
    assert found[0].examples == file.examples
    assert found == variants(file, LABELS, 4, seed=5)
    assert found != variants(file, LABELS, 4, seed=6)
    assert len(variants(file, LABELS, 100, seed=0)) == 2 * 6  # three examples have six orders


def test_class_names_that_are_numbers_are_texts(tmp_path: Path) -> None:
    file = read_prompts(prompts(tmp_path, examples=[{"text": "fine", "label": 1}]), {"0": ["bad"], "1": ["good"]}, False, "prompt")
    assert file.examples[0].label == "1"


def test_a_text_is_asked_for_by_the_word_of_its_label(tmp_path: Path) -> None:
    file = read_prompts(prompts(tmp_path, write=["A {label} review: {text}"]), LABELS, False, "prompt")
    assert writing_query(file.write[0], "bad", file) == Query("A bad review:", " ")


@pytest.mark.parametrize(
    ("contents", "place", "parts"),
    [
        ({"templates": ["Sentiment: {label}"]}, "templates[0]", ("has no {text}",)),
        ({"templates": ["{text} {text} {label}"]}, "templates[0]", ("more than one {text}",)),
        ({"templates": ["Review: {text}"]}, "templates[0]", ("has no {label}",)),
        ({"templates": ["{label}: {text}"]}, "templates[0]", ("goes on after {label}",)),
        ({"templates": ["{text} {txet} {label}"]}, "templates[0]", ("{txet} given", "{text}")),
        ({"templates": []}, "templates", ("at least 1 item",)),
        ({"write": ["A review: {text}"]}, "write[0]", ("has no {label}",)),
        ({"examples": [{"text": "a", "label": "good"}]}, "examples[0].label", ("good", "negative, positive")),
        ({"examples": [{"text": "a", "text_pair": "b", "label": "negative"}]}, "examples[0].text_pair", ("single texts",)),
        ({"system": "Label."}, "system", ("chat: true",)),
        ({"template": "a"}, "template", ("allowed: templates", "did you mean 'templates'")),
    ],
)
def test_a_file_that_lacks_something_says_so(contents: dict[str, Any], place: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    path = prompts(tmp_path, **contents)
    with pytest.raises(InputError) as caught:  # parts end in braces and quotes
        read_prompts(path, LABELS, False, "prompt")
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"prompt: {path}: {place}")
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(("contents", "part"), [(b"- a\n", "templates"), (b"templates: [", "line 1"), (b"\xff", "UTF-8")])
def test_a_file_of_another_kind_is_refused_in_one_line(contents: bytes, part: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(contents)
    with pytest.raises(InputError) as caught:
        read_prompts(str(tmp_path / "a.yaml"), LABELS, False, "prompt")
    [line] = str(caught.value).splitlines()
    assert part in line


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with raises_problem("prompt", "none.yaml"):
        read_prompts(str(tmp_path / "none.yaml"), LABELS, False, "prompt")
