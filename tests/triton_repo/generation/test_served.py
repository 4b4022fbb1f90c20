"""Language models in the real server, behind the front. Needs the server environment."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from export.engines.openvino_genai import OpenVinoGenai
from export.engines.spec import EngineSpec
from foundation.core.decoding import Decoding
from foundation.measure.probes import CHATS, PROBES
from tests.triton_repo.generation import tiny_language as tiny
from tests.triton_repo.generation.served_language import DRAFTED, KINDS, LONG, PAGED, RUNNING, WAITING, pieces, post, tokens
from triton_repo.client import RequestError
from triton_repo.generation.client import Piece, short_answer
from triton_repo.generation.text_check import ANSWER_TOKENS, Reply, check_texts
from triton_repo.service import Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def text(found: list[Piece]) -> str:
    return "".join(piece.text for piece in found)


@pytest.mark.parametrize("model", KINDS)
def test_tokens_are_those_of_transformers(running: Service, model: str) -> None:
    for prompt in tiny.prompts((1, 9, 40)):
        found = pieces(running, model, ids=prompt, max_tokens=40, ignore_eos=True, piece_seconds=0)
        assert tokens(found) == tiny.greedy(KINDS[model], prompt, 40)
        assert text(found) == tiny.tokenizer().decode(tokens(found), skip_special_tokens=True)
        assert len([piece for piece in found if piece.tokens]) == 40  # each token as it comes
        last = found[-1]
        assert (last.finish_reason, last.prompt_tokens, last.completion_tokens) == ("length", len(prompt), 40)
        assert all(piece.finish_reason is None for piece in found[:-1])


@pytest.mark.parametrize("model", KINDS)
def test_streams_side_by_side_are_those_of_each_alone(running: Service, model: str) -> None:
    count = RUNNING if model == PAGED else 1 + WAITING
    asked = [{"ids": prompt, "max_tokens": 30, "ignore_eos": True} for prompt in tiny.prompts((3, 5, 7, 9, 20, 30, 50, 60)[:count])]
    asked[1] |= {"temperature": 1.0, "seed": 5}
    alone = [pieces(running, model, **one) for one in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda one: pieces(running, model, **one), asked))
    assert [tokens(one) for one in together] == [tokens(one) for one in alone]
    assert [text(one) for one in together] == [text(one) for one in alone]


@pytest.mark.parametrize("model", KINDS)
def test_a_seed_gives_the_same_answer_again(running: Service, model: str) -> None:
    prompt = tiny.prompts((9,))[0]
    ask = {"ids": prompt, "max_tokens": 30, "temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.01}
    one, again, other = (tokens(pieces(running, model, **ask, seed=seed)) for seed in (3, 3, 4))
    assert one == again
    assert one != other


@pytest.mark.parametrize("model", KINDS)
def test_what_ends_an_answer(running: Service, model: str) -> None:
    prompt = tiny.prompts((9,))[0]
    whole = tiny.greedy(KINDS[model], prompt, 40)
    letters = tiny.tokenizer().decode(whole, skip_special_tokens=True)
    ended = pieces(running, model, ids=prompt, max_tokens=40, ignore_eos=True, stop_tokens=[whole[4]])
    assert tokens(ended) == whole[: whole.index(whole[4]) + 1]
    assert ended[-1].finish_reason == "stop"
    stop = letters[5:8]
    ended = pieces(running, model, ids=prompt, max_tokens=40, ignore_eos=True, stop=[stop, "never there"])
    assert text(ended) == letters[: letters.index(stop)]
    assert ended[-1].finish_reason == "stop"
    assert pieces(running, model, timeout_seconds=1.0, **LONG)[-1].finish_reason == "timeout"
    assert sum(piece.completion_tokens or 0 for piece in pieces(running, model, ids=prompt)) <= 128


@pytest.mark.parametrize("model", KINDS)
def test_a_penalty_that_the_engine_gets_wrong_is_the_fault_of_the_request(running: Service, model: str) -> None:
    prompt = tiny.prompts((9,))[0]
    ask = {"INPUT_IDS": prompt.tolist(), "MAX_TOKENS": 8, "IGNORE_EOS": True}
    for name in ("PRESENCE_PENALTY", "FREQUENCY_PENALTY"):
        for value in (0.5, 3.0):  # within and beyond the limits of the library
            status, _, answer = post(running, f"/v2/models/{model}/generate", {**ask, name: value})
            error = json.loads(answer.read())["error"]
            assert (status, f"{name}: {value:g} given; 0 is allowed" in error) == (400, True), error
            assert "the model failed" not in error
    assert tokens(pieces(running, model, ids=prompt, max_tokens=8, ignore_eos=True, presence_penalty=0.0)) == tiny.greedy(
        KINDS[model], prompt, 8
    )


def test_a_draft_changes_no_token(running: Service) -> None:
    prompts = [*tiny.prompts((3, 9, 40)), np.tile(tiny.prompts((20,))[0], 20)]  # the last one is longer than a step without a draft
    ask = {"max_tokens": 40, "ignore_eos": True, "piece_seconds": 0}
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: pieces(running, DRAFTED, ids=prompt, **ask), prompts))
    assert [tokens(one) for one in found] == [tiny.greedy("llama", prompt, 40) for prompt in prompts]
    assert {len(piece.tokens) for piece in found[0]} == {1, 4, 5}
    with pytest.raises(RequestError, match=r"TEMPERATURE: 0\.5 given; a draft proposes"):
        pieces(running, DRAFTED, text="a", temperature=0.5)


def test_a_whole_answer_is_one_response(running: Service) -> None:
    prompt = tiny.prompts((9,))[0]
    [whole] = pieces(running, PAGED, ids=prompt, max_tokens=20, ignore_eos=True, stream=False)
    assert whole.tokens == tiny.greedy("llama", prompt, 20)
    assert whole.completion_tokens == 20


def test_a_search_gives_its_best_answers(running: Service) -> None:
    prompt = tiny.prompts((9,))[0]
    best = pieces(running, PAGED, ids=prompt, max_tokens=6, ignore_eos=True, stream=False, beams=4, answers=2)
    assert [piece.index for piece in best] == [0, 1]
    assert best[0].tokens != best[1].tokens
    assert all(len(piece.tokens) == 6 for piece in best)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_search_is_that_of_the_engine(running: Service, penalty: float) -> None:
    """Of prompts after which some beams reach the end token, so that the length penalty chooses among short and long answers."""
    folder = tiny.genai_folder("llama")
    properties = {**tiny.PROPERTIES, "ATTENTION_BACKEND": tiny.MODES["paged"]}
    place = str(folder / "openvino_model.xml"), str(folder)
    engine = OpenVinoGenai(EngineSpec("openvino_genai", "paged", "fp32", "fp32", "cpu", 1, *place, properties=properties))
    found = tiny.prompts((2, 3, 4, 5, 6, 7) * 20, seed=1)
    asked = [found[number] for number in (50, 67, 72, 100)]
    for answers in (1, 3, 4):
        decoding = Decoding(max_tokens=40, beams=4, answers=answers, length_penalty=penalty)
        expected = [[list(one) for one in answer.tokens] for answer in engine.generate(asked, decoding)]
        assert all(len(one) == answers for one in expected)
        settings = {"max_tokens": 40, "beams": 4, "answers": answers, "length_penalty": penalty, "stream": False}
        served = [pieces(running, PAGED, ids=prompt, **settings) for prompt in asked]
        assert [[piece.tokens for piece in one] for one in served] == expected
        assert [[piece.index for piece in one] for one in served] == [list(range(answers))] * len(asked)


@pytest.mark.parametrize("model", KINDS)
def test_chat_and_text(running: Service, model: str) -> None:
    def ids(prompt: str) -> list[int]:
        return tiny.tokenizer()(prompt)["input_ids"]

    ask = {"max_tokens": 10, "ignore_eos": True}
    plain = tokens(pieces(running, model, text="user:hi a:", **ask))
    assert plain == tiny.greedy(KINDS[model], np.array(ids("user:hi a:"), np.int32), 10)
    assert tokens(pieces(running, model, text="hi", chat=True, **ask)) == plain
    assert tokens(pieces(running, model, messages=[{"role": "user", "content": "hi"}], **ask)) == plain
    assert tokens(pieces(running, model, text="hi", **ask)) != plain


@pytest.mark.parametrize("model", KINDS)
def test_texts_and_conversations_are_read_as_transformers_reads_them(running: Service, model: str) -> None:
    def ask(prompt: Mapping[str, Any]) -> Reply:
        piece = short_answer(running.grpc_address, model, prompt, ANSWER_TOKENS)
        return Reply(piece.prompt_tokens or 0, piece.tokens, piece.text)

    asked = check_texts(model, tiny.genai_folder(KINDS[model]), tiny.prompts((9, 5)), 250, chats=True, ask=ask)
    assert asked == len(PROBES) + 2 + len(CHATS)


def events(answer: http.client.HTTPResponse) -> list[dict[str, Any]]:
    parts = answer.read().decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize("model", KINDS)
def test_server_sent_events(running: Service, model: str) -> None:
    prompt = tiny.prompts((9,))[0]
    document = {"id": "mine", "INPUT_IDS": prompt.tolist(), "MAX_TOKENS": 20, "parameters": {"IGNORE_EOS": True}}
    status, kind, answer = post(running, f"/v2/models/{model}/generate_stream", document)
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    found = events(answer)
    assert [token for event in found for token in event["TOKENS"]] == tiny.greedy(KINDS[model], prompt, 20)
    assert found[-1]["FINISH_REASON"] == "length"
    assert all(event["id"] == "mine" for event in found)
    status, kind, answer = post(running, f"/v2/models/{model}/generate", document)
    whole = json.loads(answer.read())
    assert (status, kind) == (200, "application/json; charset=utf-8")
    assert whole["TOKENS"] == tiny.greedy(KINDS[model], prompt, 20)
    assert whole["TEXT"] == "".join(event["TEXT"] for event in found)
