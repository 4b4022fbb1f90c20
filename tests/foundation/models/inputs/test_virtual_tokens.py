"""Virtual tokens in front of texts, by every kind of tokenizer that puts special tokens around them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from foundation.models.inputs.virtual_tokens import prefixed
from tests.problems import raises_problem

WORDS = ["[CLS]", "[SEP]", "a", "b", "c", "d"]
TEMPLATE = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
)
POSTS: dict[str, Any] = {
    "none": None,
    "template": TEMPLATE,
    "bert": processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0)),
    "roberta": processors.RobertaProcessing(("[SEP]", 1), ("[CLS]", 0)),
    "bytes": processors.ByteLevel(),
    "bytes, then template": processors.Sequence([processors.ByteLevel(), TEMPLATE]),
    "bytes alone in a sequence": processors.Sequence([processors.ByteLevel()]),
}


def both(post: Any, behind: bool = False) -> tuple[Tokenizer, Tokenizer]:
    """Returns a tokenizer, and the same with three virtual tokens."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if post is not None:
        made.post_processor = post
    document = json.loads(made.to_str())
    document["post_processor"] = prefixed(document["post_processor"], 6, 3, behind=behind)
    return made, Tokenizer.from_str(json.dumps(document))


@pytest.mark.parametrize("post", POSTS.values(), ids=POSTS)
@pytest.mark.parametrize("texts", [("a b",), ("a b", "c d a"), ("",)])
def test_ids_are_those_of_before_after_the_virtual_ones(post: Any, texts: tuple[str, ...]) -> None:
    before, after = both(post)
    known, found = before.encode(*texts), after.encode(*texts)
    assert found.ids == [6, 7, 8, *known.ids]
    assert found.type_ids == [0, 0, 0, *known.type_ids]
    assert found.special_tokens_mask[:3] == [1, 1, 1]
    pair = len(texts) > 1
    assert after.num_special_tokens_to_add(pair) == before.num_special_tokens_to_add(pair) + 3


@pytest.mark.parametrize("post", POSTS.values(), ids=POSTS)
def test_long_texts_lose_tokens_of_their_own(post: Any) -> None:
    before, after = both(post)
    after.enable_truncation(8)
    before.enable_truncation(5)
    assert after.encode("a b c d a b c d").ids == [6, 7, 8, *before.encode("a b c d a b c d").ids]


@pytest.mark.parametrize("kind", ["template", "bert", "roberta", "bytes, then template"])
@pytest.mark.parametrize("texts", [("a b",), ("a b", "c d a")])
def test_virtual_tokens_may_stand_behind_the_first_special_one(kind: str, texts: tuple[str, ...]) -> None:
    before, after = both(POSTS[kind], behind=True)
    known = before.encode(*texts).ids
    assert after.encode(*texts).ids == [known[0], 6, 7, 8, *known[1:]]


@pytest.mark.parametrize("kind", ["none", "bytes"])
def test_texts_without_a_first_special_token_have_no_place_behind_it(kind: str) -> None:
    with raises_problem("prompt.place", "behind_first", "front"):
        both(POSTS[kind], behind=True)


def test_no_text_has_a_virtual_token() -> None:
    _, after = both(TEMPLATE)
    assert after.encode("<|prompt|>").ids == after.encode("x").ids  # both are unknown words


def test_a_second_prompt_is_refused() -> None:
    _, after = both(TEMPLATE)
    with raises_problem("prompt", "virtual tokens already"):
        prefixed(json.loads(after.to_str())["post_processor"], 9, 2)


def test_an_unknown_end_of_a_tokenizer_is_refused() -> None:
    with raises_problem("prompt", "Other", "TemplateProcessing"):
        prefixed({"type": "Other"}, 9, 2)
