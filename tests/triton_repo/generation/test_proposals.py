"""Tokens that are proposed to a served model: the files of its repository, and its engine in this process, without a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundation.core.engines import served_on
from tests.problems import raises_problem
from tests.test_generation import recipe
from tests.test_proposals import TARGET, stages
from tests.triton_repo.generation import tiny_language as tiny
from triton_repo import layout
from triton_repo.config import from_text
from triton_repo.generation.layout import write_language_repository
from triton_repo.generation.served.genai import open_model
from triton_repo.generation.served.opened import Opened
from triton_repo.generation.served.request import Limits, Refused, read
from triton_repo.triton_repo import TritonRepo

TOKENS = 40
RUNNING = 4


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model without proposals, with a draft, and with its text looked up."""
    root = tmp_path_factory.mktemp("proposals")
    exported = tiny.export(root / "export", drafted=True, count=2)
    [model] = layout.served_models(exported, served_on("cpu", generates=True))
    write_language_repository(root / "nothing", [model], batch_sizes=(RUNNING,))
    write_language_repository(root / "draft", [model], batch_sizes=(RUNNING,), proposals=True)
    model.engine.speculation.update(file=None, draft=None, properties={}, tokens=3)  # type: ignore[union-attr]
    write_language_repository(root / "text", [model], batch_sizes=(RUNNING,), proposals=True)
    return {name: root / name for name in ("nothing", "draft", "text")}


def parameters(repository: Path) -> dict[str, str]:
    config = from_text((repository / "llama-fp32" / "config.pbtxt").read_text())
    return {name: value.string_value for name, value in config.parameters.items()}


def test_a_draft_lies_beside_the_model_where_it_is_asked_for(repositories: dict[str, Path]) -> None:
    assert "proposals" not in parameters(repositories["nothing"])
    assert not (repositories["nothing"] / "llama-fp32" / "1" / "draft").exists()
    told = json.loads(parameters(repositories["draft"])["proposals"])
    assert (told["tokens"], told["draft"], told["properties"]["KV_CACHE_PRECISION"]) == (4, True, "f32")
    version = repositories["draft"] / "llama-fp32" / "1"
    assert {path.name for path in (version / "draft").iterdir()} == {path.name for path in (version / "genai").iterdir()}
    assert "| a draft, 4 at once |" in (repositories["draft"] / "README.md").read_text()
    assert json.loads(parameters(repositories["text"])["proposals"]) == {"tokens": 3, "draft": False, "properties": {}}
    assert not (repositories["text"] / "llama-fp32" / "1" / "draft").exists()
    assert "| the text, 3 at once |" in (repositories["text"] / "README.md").read_text()


@pytest.fixture(scope="module")
def opened(repositories: dict[str, Path]) -> Iterator[dict[str, Opened]]:
    found = {}
    for name, repository in repositories.items():
        given = {**parameters(repository), "max_waiting": "100", "context": "4000"}
        found[name] = open_model(repository / "llama-fp32" / "1", given)
        found[name].engine.start()
    yield found
    for one in found.values():
        one.engine.close()


class Client:
    """Keeps what it is sent."""

    gone = False

    def __init__(self) -> None:
        self.pieces: list[dict[str, Any]] = []
        self.refused: str | None = None
        self.over = threading.Event()

    def send(self, outputs: dict[str, Any], *, last: bool) -> None:
        self.pieces.append(outputs)
        if last:
            self.over.set()

    def refuse(self, line: str, code: str) -> None:
        self.refused = line
        self.over.set()

    @property
    def tokens(self) -> list[int]:
        assert self.over.wait(60)
        assert self.refused is None, self.refused
        return [token for piece in self.pieces for token in piece["TOKENS"]]


def ask(model: Opened, prompt: np.ndarray, **inputs: Any) -> Client:
    given = {"INPUT_IDS": prompt, "MAX_TOKENS": TOKENS, "IGNORE_EOS": True, "PIECE_SECONDS": 0.0, **inputs}
    client = Client()
    asked = read({name: np.atleast_1d(np.asarray(value)) for name, value in given.items()}, model.limits, model.tokenizer)
    model.engine.submit(model.answer(asked, client))
    return client


PROMPTS = [np.tile(prompt, 30) if number % 2 else prompt for number, prompt in enumerate(tiny.prompts((9, 12, 30, 20, 70, 15)))]
"""Short ones, and some that are longer than a step of the engine."""


@pytest.mark.whole
@pytest.mark.parametrize("name", ["draft", "text"])
def test_answers_side_by_side_are_those_without_proposals(opened: dict[str, Opened], name: str) -> None:
    clients = {one: [ask(opened[one], prompt) for prompt in PROMPTS] for one in ("nothing", name)}
    expected, found = ([client.tokens for client in clients[one]] for one in ("nothing", name))
    assert found == expected
    assert found[0] == tiny.greedy("llama", PROMPTS[0], TOKENS)
    sizes = [len(piece["TOKENS"]) for client in clients[name] for piece in client.pieces]
    assert max(sizes) == (5 if name == "draft" else 4)  # several tokens came with one step
    assert {len(piece["TOKENS"]) for client in clients["nothing"] for piece in client.pieces} == {1}


@pytest.mark.whole
@pytest.mark.parametrize("name", ["draft", "text"])
def test_stop_tokens_and_penalties_are_kept(opened: dict[str, Opened], name: str) -> None:
    whole = ask(opened["nothing"], PROMPTS[0]).tokens
    for inputs in ({"STOP_TOKENS": [whole[6]]}, {"REPETITION_PENALTY": 1.3}, {"MAX_TOKENS": 1}, {"MAX_TOKENS": 2}):
        found, expected = (ask(opened[one], PROMPTS[0], **inputs) for one in (name, "nothing"))
        assert found.tokens == expected.tokens
        assert found.pieces[-1]["FINISH_REASON"] == expected.pieces[-1]["FINISH_REASON"]


@pytest.mark.first(1)
@pytest.mark.whole
@pytest.mark.parametrize("name", ["draft", "text"])
def test_the_end_token_of_the_model_ends_an_answer(opened: dict[str, Opened], name: str) -> None:
    """OpenVINO GenAI does not know it where tokens are proposed."""
    prompts = tiny.prompts((2, 3, 4, 5, 6, 7) * 8, seed=1)
    asked = {"IGNORE_EOS": False, "MAX_TOKENS": 60, "REPETITION_PENALTY": 1.3}
    clients = {one: [ask(opened[one], prompt, **asked) for prompt in prompts] for one in ("nothing", name)}
    expected, found = ([client.tokens for client in clients[one]] for one in ("nothing", name))
    assert found == expected
    assert any(tokens[-1] == tiny.EOS and len(tokens) < 60 for tokens in expected)


@pytest.mark.whole
def test_an_answer_that_is_left_makes_room_beside_a_draft(opened: dict[str, Opened]) -> None:
    left = [ask(opened["draft"], PROMPTS[0], MAX_TOKENS=3000) for _ in range(RUNNING)]
    for client in left:
        client.gone = True
    assert ask(opened["draft"], PROMPTS[2]).tokens == ask(opened["nothing"], PROMPTS[2]).tokens
    assert all(client.over.wait(60) for client in left)


@pytest.mark.whole
def test_a_text_that_proposes_changes_no_drawing(opened: dict[str, Opened]) -> None:
    drawn = [ask(opened[name], PROMPTS[1], TEMPERATURE=0.8, SEED=3).tokens for name in ("text", "nothing")]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("proposes", "inputs", "line"),
    [
        ("draft", {"TEMPERATURE": 0.5}, "TEMPERATURE: 0.5 given; a draft proposes tokens to this model"),
        ("draft", {"BEAMS": 2, "STREAM": False}, "BEAMS: 2 given; tokens are proposed to this model, which does not search"),
        ("text", {"BEAMS": 2, "STREAM": False}, "BEAMS: 2 given; tokens are proposed to this model, which does not search"),
    ],
)
def test_what_no_proposals_can_be_made_for_is_refused(proposes: str, inputs: dict[str, Any], line: str) -> None:
    limits = Limits(context=64, vocabulary=100, seconds=30.0, chat=False, beams=False, proposes=proposes)
    with pytest.raises(Refused) as caught:
        read({name: np.atleast_1d(value) for name, value in {"INPUT_IDS": [5], **inputs}.items()}, limits, None)  # type: ignore[arg-type]
    assert line in str(caught.value)


def test_nothing_is_served_that_was_not_measured() -> None:
    with raises_problem("stages.triton_repo.proposals", "true", "export proposes no tokens"):
        recipe(target=TARGET, stages=[*stages(), {"triton_repo": {"proposals": True}}])
    assert recipe(target=TARGET, stages=[*stages(draft="draft"), {"triton_repo": {"proposals": True}}]).stages[-1].proposals  # type: ignore[union-attr]
    assert "proposals" not in TritonRepo().model_dump(mode="json")
