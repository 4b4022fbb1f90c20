"""Tokens that are proposed to OpenVINO GenAI: greedy answers stay the same, and what was accepted is what a written-out search accepts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from export.engines.openvino_genai import OpenVinoGenai, speculating
from export.engines.spec import EngineSpec
from foundation.core.decoding import Answer, Decoding
from foundation.core.errors import InputError
from foundation.core.speculation import Speculation
from foundation.models.checkpoint import load_float
from tests.export.engines.test_openvino_genai import engine, spec
from tests.export.generation.genai_checkpoints import checkpoint, prompts, tokenizer

pytestmark = pytest.mark.whole

TOKENS = 28
DRAFTED = 4
GREEDY = Decoding(max_tokens=TOKENS, ignore_end=True)
DRAFTS = {"itself": ("llama", None), "its int8 form": ("llama", "w8a8-dynamic"), "another model": ("gpt2", None)}

LIMITS = {"itself": (1, 1), "its int8 form": (0.1, 0.99), "another model": (0, 0.1)}
"""Shares of accepted tokens; one that is neither 0 nor 1 proves most."""


@cache
def drafted(draft: str, tokens: int = DRAFTED) -> OpenVinoGenai:
    small = spec(*DRAFTS[draft])
    return OpenVinoGenai(replace(spec("llama"), speculation=Speculation(tokens, small.path, small.properties)))


@cache
def looked_up(tokens: int = 5) -> OpenVinoGenai:
    return OpenVinoGenai(replace(spec("llama"), speculation=Speculation(tokens)))


def asked() -> list[np.ndarray]:
    return prompts((9, 20, 3), seed=4)


def repeating() -> list[np.ndarray]:
    return [np.tile(prompt, 4) for prompt in prompts((6, 4, 5), seed=4)]


@cache
def loaded(kind: str, scheme: str | None) -> Any:
    return load_float(checkpoint(kind, scheme))


def next_tokens(kind: str, scheme: str | None, text: list[int], count: int) -> list[int]:
    """The most likely next tokens of a model, each from the whole text, without a cache."""
    model, ids = loaded(kind, scheme), torch.tensor([text])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(dim=-1)], dim=1)
    return ids[0, len(text) :].tolist()


def written_out(prompt: np.ndarray, answer: list[int], propose: Any, tokens: int) -> tuple[int, int]:
    """Proposed and accepted tokens, step by step: proposals count up to the first that is not the answer's."""
    done, proposed, accepted = 1, 0, 0
    while done < len(answer):
        offered = propose([*prompt.tolist(), *answer[:done]])[: min(tokens, len(answer) - done - 1)]
        taken = 0
        while taken < len(offered) and offered[taken] == answer[done + taken]:
            taken += 1
        proposed, accepted, done = proposed + len(offered), accepted + taken, done + taken + 1
    return proposed, accepted


def first_occurrence(text: list[int]) -> list[int]:
    """What followed the last three tokens, or two, or one, where they occurred first."""
    for size in (3, 2, 1):
        for start in range(len(text) - size):
            if text[start : start + size] == text[-size:]:
                return text[start + size :]
    return []


def check(found: list[Answer], asked_: list[np.ndarray], propose: Any, tokens: int) -> list[float]:
    """Checks answers against the model alone and the written-out search; returns the share of accepted tokens of each."""
    alone = engine("llama").generate(asked_, GREEDY)
    shares = []
    for prompt, answer, expected in zip(asked_, found, alone, strict=True):
        assert answer.tokens == expected.tokens
        assert len(answer.seconds) == TOKENS
        assert (answer.proposed, answer.accepted) == written_out(prompt, list(expected.tokens[0]), propose, tokens)
        shares.append(answer.accepted / answer.proposed)
    return shares


@pytest.mark.first(1)
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_changes_no_token_and_its_share_is_that_of_a_written_out_search(draft: str) -> None:
    kind, scheme = DRAFTS[draft]
    shares = check(drafted(draft).generate(asked(), GREEDY), asked(), lambda text: next_tokens(kind, scheme, text, DRAFTED), DRAFTED)
    assert LIMITS[draft][0] <= np.mean(shares) <= LIMITS[draft][1]


def test_what_is_looked_up_changes_no_token_and_its_share_is_that_of_a_written_out_search() -> None:
    shares = check(looked_up().generate(repeating(), GREEDY), repeating(), first_occurrence, 5)
    assert 0.05 < np.mean(shares) < 0.95


@pytest.mark.parametrize("made", [lambda: drafted("its int8 form"), looked_up])
def test_penalties_and_ends_are_those_of_the_model_alone(made: Any) -> None:
    whole = engine("llama").generate(repeating(), GREEDY)[0].tokens[0]
    for decoding in (
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, stop_tokens=(whole[7],)),
        Decoding(max_tokens=TOKENS, stop_tokens=(whole[7],)),
        Decoding(max_tokens=1),
        Decoding(max_tokens=2),
    ):
        (found,) = made().generate(repeating()[:1], decoding)
        (alone,) = engine("llama").generate(repeating()[:1], decoding)
        assert found.tokens == alone.tokens
        assert 0 <= found.accepted <= found.proposed


@pytest.mark.parametrize("made", [lambda: drafted("itself"), lambda: drafted("its int8 form"), looked_up])
def test_texts_end_an_answer_where_they_end_that_of_the_model_alone(made: Any) -> None:
    """They are looked for outside of OpenVINO GenAI, which passes some of them over where tokens are proposed, and fails at others."""
    prompt, greedy = repeating()[0], replace(GREEDY, repetition_penalty=1.2)
    whole = engine("llama").generate([prompt], greedy)[0].tokens[0]
    for at, width in ((0, 1), (0, 3), (1, 3), (3, 2), (3, 3), (6, 2), (13, 1)):
        decoding = replace(greedy, stop=(tokenizer().decode(whole[at : at + width]),))
        told: list[int] = []
        (found,) = made().generate([prompt], decoding, lambda number, tokens, told=told: told.extend(tokens))
        (alone,) = engine("llama").generate([prompt], decoding)
        assert found.tokens == alone.tokens
        assert told == list(found.tokens[0])
        assert len(found.seconds) == len(found.tokens[0])
        assert 0 <= found.accepted <= found.proposed
    assert made().generate([prompt], greedy)[0].tokens == (whole,)  # what was cut off left nothing behind


@pytest.mark.parametrize("made", [lambda: drafted("its int8 form"), looked_up])
def test_many_long_prompts_at_once_are_answered_as_each_alone(made: Any) -> None:
    """More tokens than OpenVINO GenAI reads in a step by default."""
    many = prompts((70, 300, 20, 90, 50, 60, 80, 40), seed=6)
    together, alone = made().generate(many, GREEDY), engine("llama").generate(many, GREEDY)
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    for prompt, answer in zip(many, together, strict=True):
        (by_itself,) = made().generate([prompt], GREEDY)
        assert (answer.proposed, answer.accepted) == (by_itself.proposed, by_itself.accepted)


def test_tokens_are_told_as_they_come() -> None:
    told: list[list[int]] = []
    (answer,) = drafted("itself").generate(asked()[:1], GREEDY, lambda number, tokens: told.append(list(tokens)))
    assert [token for tokens in told for token in tokens] == list(answer.tokens[0])
    assert [len(tokens) for tokens in told] == [1, *[DRAFTED + 1] * 5, 2]


def test_a_seed_draws_the_same_with_look_up_as_without() -> None:
    decoding = replace(GREEDY, temperature=0.7, seed=5)
    found = looked_up().generate(repeating()[:1], decoding)
    assert found[0].tokens == engine("llama").generate(repeating()[:1], decoding)[0].tokens


@pytest.mark.parametrize(
    ("made", "decoding", "line"),
    [
        (lambda: drafted("itself"), Decoding(beams=3), "beams: 3 given with a draft; a search takes no proposals"),
        (looked_up, Decoding(beams=3), "beams: 3 given with prompt look-up"),
        (lambda: drafted("itself"), Decoding(temperature=0.5), "temperature: 0.5 given with a draft"),
        (lambda: OpenVinoGenai(replace(spec("mistral"), speculation=Speculation(3))), Decoding(), "runs in stateful mode"),
        (lambda: OpenVinoGenai(replace(spec("llama"), speculation=Speculation(0))), Decoding(), "0 tokens at once given; 1 to 32"),
    ],
)
def test_what_cannot_be_is_one_line(made: Any, decoding: Decoding, line: str) -> None:
    with pytest.raises(InputError, match=line):
        made().generate(asked()[:1], decoding)


def test_a_spec_travels_with_what_proposes() -> None:
    sent = replace(spec("llama"), speculation=Speculation(3, "draft.xml", {"a": "b"}))
    assert EngineSpec.from_message(sent.message()) == sent
    assert EngineSpec.from_message(spec("llama").message()) == spec("llama")


def test_neither_a_model_nor_its_draft_is_opened_for_bfloat16_that_the_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.standalone.openvino_request.computes_bf16", lambda core: False)
    given = spec("llama")
    half = {**given.properties, "INFERENCE_PRECISION_HINT": "bf16"}
    with pytest.warns(UserWarning, match="no bfloat16"):
        opened = OpenVinoGenai(replace(given, properties=half))
    assert opened.placement()["float_precision"] == "fp32"
    with pytest.warns(UserWarning, match="no bfloat16"):
        speculating(Speculation(DRAFTED, given.path, half))
