"""A request at random from all that the limits allow harms nobody: an answer beside it is what it is alone, in every served engine.

What is wrong is refused before it reaches the engine. What is taken is answered, nobody waits for it, and the engine is not made anew. With
`--hypothesis-profile thorough` more of them are drawn.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.engines import onnxruntime_decoder
from foundation.standalone import onnx_decoder
from foundation.standalone.onnx_decoder import Texts
from tests.export.engines.test_onnxruntime_decoder import folder as fused_folder
from tests.export.generation import tiny_encoder_decoders
from tests.export.generation.genai_checkpoints import genai_folder
from tests.export.generation.tiny_decoders import VOCABULARY
from tests.seldom import seldom
from tests.triton_repo.generation import tiny_language
from tests.triton_repo.generation.random_requests import Inputs, requests
from tests.triton_repo.generation.test_engine import Client
from tests.triton_repo.generation.tiny_language import MODES, PROPERTIES
from triton_repo.generation.config import LanguageSettings, parameters
from triton_repo.generation.served import genai, onnx, seq2seq
from triton_repo.generation.served.opened import Opened
from triton_repo.generation.served.request import BUSY, WRONG, Refused, read

pytestmark = pytest.mark.whole

CONTEXT, ROOM, WAITING = 40, 6, 8
PART = 16
"""Tokens of a prompt that ONNX Runtime reads at once, here."""
STEADY = {"MAX_TOKENS": np.array([16], np.int32), "IGNORE_EOS": np.array([True]), "PIECE_SECONDS": np.zeros(1, np.float32)}
SPARE_STEPS = 2
"""Steps of an answer beyond those that it takes alone."""
WAIT_SECONDS = 120.0
BEFORE, MOST = -1, 2**31
"""Steps of the steady answer after which another one comes: before it, and after it."""
SEEDS = 2
"""Steady prompts."""
_SCRATCH = tempfile.TemporaryDirectory(prefix="neighbours-")


def _settings(mode: Any, properties: Mapping[str, str], special: Mapping[str, Any] | None = None) -> dict[str, str]:
    return parameters(
        LanguageSettings(
            name="m",
            mode=mode,
            architecture="decoder" if special is None else "encoder_decoder",
            properties=properties,
            context=CONTEXT,
            vocabulary=VOCABULARY,
            max_running=ROOM,
            max_waiting=WAITING,
            special=special or {},
        )
    )


def _version(name: str, part: str, files: Path) -> Path:
    """The folder of a version whose engine reads `files`."""
    folder = Path(_SCRATCH.name, name)
    folder.mkdir()
    (folder / part).symlink_to(files)
    return folder


def _genai(name: str, kind: str, mode: str, scheme: str | None = None) -> Opened:
    properties = {**PROPERTIES, "ATTENTION_BACKEND": MODES[mode]}
    files = tiny_language.genai_folder(kind) if scheme is None else genai_folder(kind, scheme)
    return genai.open_model(_version(name, genai.GENAI, files), _settings(mode, properties))


def _onnx(name: str, scheme: str | None = None) -> Opened:
    folder = _version(name, onnx.ONNX, fused_folder("llama", scheme))
    return onnx.open_model(folder, _settings("batched", onnxruntime_decoder.properties(1)))


def _seq2seq(name: str, scheme: str | None = None) -> Opened:
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": "1"}
    special = {"start": tiny_encoder_decoders.START, "pad": tiny_encoder_decoders.PAD, "ends": [tiny_encoder_decoders.EOS], "first": None}
    folder = _version(name, seq2seq.SEQ2SEQ, tiny_encoder_decoders.folder("t5", scheme))
    return seq2seq.open_model(folder, _settings("paged", properties, special))


OPEN: Mapping[str, Callable[[str], Opened]] = {
    "paged": lambda name: _genai(name, "llama", "paged"),
    "stateful": lambda name: _genai(name, "mistral", "stateful"),
    "onnx": _onnx,
    "seq2seq": _seq2seq,
    "paged w8a8": lambda name: _genai(name, "llama", "paged", "w8a8"),
    "paged w4a16": lambda name: _genai(name, "llama", "paged", "w4a16"),
    "onnx w8a8-dynamic": lambda name: _onnx(name, "w8a8-dynamic"),
    "onnx w4a16": lambda name: _onnx(name, "w4a16"),
    "seq2seq w8a8": lambda name: _seq2seq(name, "w8a8"),
    "seq2seq w4a16": lambda name: _seq2seq(name, "w4a16"),
}
FLOAT, INTEGER = [name for name in OPEN if " " not in name], [name for name in OPEN if " " in name]
SELDOM = ("paged w8a8", "onnx w4a16", "seq2seq w8a8", "seq2seq w4a16")
MANY = settings.default.max_examples


class Steady(Client):
    """A client that counts the steps from the first token of its answer to the last."""

    def __init__(self, now: Callable[[], int]) -> None:
        super().__init__()
        self._now, self._first, self.steps = now, -1, 0

    def send(self, outputs: dict[str, Any], *, last: bool) -> None:
        self._first = self._now() if self._first < 0 else self._first
        self.steps = self._now() - self._first
        super().send(outputs, last=last)


class Served:
    """A model that answers, whose steps are counted."""

    given = 0
    """Tokens that ONNX Runtime was given since the last step."""

    def __init__(self, opened: Opened) -> None:
        self.opened, self.engine = opened, opened.engine
        self.renewals = self.steps = self.rows = self.tokens = 0
        """Of the last one: most rows that were held at once, and most tokens of a step."""
        self._due: list[tuple[int, Inputs]] = []
        self.clients: list[Client] = []
        """Those that came beside, and were taken."""
        self.codes: set[str] = set()
        """Codes of those that were not."""
        self._whole, self._renewal = self.engine._step, self.engine._renew
        self.engine._step, self.engine._renew = self._step, self._renew  # type: ignore[method-assign]
        self.engine.start()

    @property
    def beams(self) -> int:
        """Most beams of a search."""
        return self.engine._room

    def _step(self) -> None:
        self._join(self.steps)
        self.steps += 1
        self.rows = max(self.rows, sum(answer.request.values["BEAMS"] for answer in self.engine._running()))
        self._whole()
        self.tokens, Served.given = max(self.tokens, Served.given), 0

    def _renew(self) -> None:
        self.renewals += 1
        self._renewal()

    def submit(self, inputs: Inputs, client: Client) -> None:
        """Asks, as the model of the server does.

        Raises:
            Refused: The request is wrong, or there is no room for it.
        """
        asked = read(inputs, self.opened.limits, self.opened.tokenizer)
        self.engine.submit(self.opened.answer(asked, client))

    def beside(self, steady: np.ndarray, others: Sequence[tuple[int, Inputs]]) -> tuple[list[int], int]:
        """Returns the tokens of a steady answer, and its steps, while others come beside it, each before it or after so many steps."""
        self.steps = self.rows = self.tokens = 0
        self.clients, self._due = [], []
        for _, inputs in (one for one in others if one[0] == BEFORE):
            self._ask(inputs)
        self._due = [one for one in others if one[0] != BEFORE]
        client = Steady(lambda: self.steps)
        self.submit({"INPUT_IDS": steady.astype(np.int64), **STEADY}, client)
        found = whole(client)
        self._join(MOST)
        for other in self.clients:
            assert other.over.wait(WAIT_SECONDS), "an answer stalls"
        return found, client.steps

    def _join(self, steps: int) -> None:
        """Submits those that come after so many steps."""
        due, self._due = [one for one in self._due if one[0] <= steps], [one for one in self._due if one[0] > steps]
        for _, inputs in due:
            self._ask(inputs)

    def _ask(self, inputs: Inputs) -> None:
        client = Client()
        try:
            self.submit(inputs, client)
        except Refused as error:
            self.codes.add(error.code)
        else:
            self.clients.append(client)


def whole(client: Client) -> list[int]:
    assert client.over.wait(WAIT_SECONDS), "an answer stalls"
    assert client.refused is None, client.refused
    return [token for piece in client.pieces for token in piece["TOKENS"]]


@cache
def served(name: str) -> Served:
    return Served(OPEN[name](name))


@pytest.fixture(scope="module", autouse=True)
def short_parts() -> Iterator[None]:
    """ONNX Runtime reads prompts in short parts, and the tokens that it is given are counted."""
    run = Texts._run

    def counted(self: Texts, tokens: np.ndarray, *rest: Any) -> Any:
        Served.given += tokens.size
        return run(self, tokens, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_decoder, "PART", PART)
        patch.setattr(Texts, "_run", counted)
        yield


@pytest.mark.first(1)
@pytest.mark.parametrize("name", FLOAT)
@settings(max_examples=max(10, MANY // 4))
@given(st.data())
def test_an_answer_is_what_it_is_alone_whatever_comes_beside_it(name: str, data: st.DataObject) -> None:
    model, seed = served(name), data.draw(st.integers(0, SEEDS - 1))
    (steady,) = tiny_language.prompts((9,), seed)
    alone, steps = answered_alone(name, seed)
    found, beside = model.beside(steady, data.draw(others(model)))
    assert found == alone
    harmed_nobody(model)
    if name != "stateful":  # which answers one after the other
        assert beside <= steps + SPARE_STEPS


@pytest.mark.first(1)
@pytest.mark.parametrize("name", seldom(INTEGER, SELDOM))
@settings(max_examples=max(4, MANY // 8))
@given(st.data())
def test_in_integers_no_more_tokens_change_than_beside_harmless_answers(name: str, data: st.DataObject) -> None:
    model, seed = served(name), data.draw(st.integers(0, SEEDS - 1))
    (steady,) = tiny_language.prompts((9,), seed)
    alone, steps = answered_alone(name, seed)
    found, beside = model.beside(steady, data.draw(others(model)))
    assert changed(found, alone) <= harmless(name, seed)
    harmed_nobody(model)
    assert beside <= steps + SPARE_STEPS


def harmed_nobody(model: Served) -> None:
    """Checks that whatever was taken was answered, and that the rest was refused as wrong, or for want of room."""
    assert [client.refused for client in model.clients] == [None] * len(model.clients)
    assert model.codes <= {WRONG, BUSY}
    assert model.renewals == 0
    assert model.rows <= ROOM
    assert model.tokens <= PART + ROOM  # the part of a prompt, and a token of each answer


@cache
def answered_alone(name: str, seed: int) -> tuple[list[int], int]:
    """The tokens of a steady answer with nothing beside it, and its steps."""
    return served(name).beside(tiny_language.prompts((9,), seed)[0], [])


@cache
def harmless(name: str, seed: int) -> int:
    """Most tokens of a steady answer that change beside greedy ones: the order of sums is another one in another batch."""
    model, (steady,) = served(name), tiny_language.prompts((9,), seed)
    alone, _ = answered_alone(name, seed)
    most = 0
    for count in (1, 3, ROOM - 1):
        beside = [(0, {"INPUT_IDS": prompt.astype(np.int64), **STEADY}) for prompt in tiny_language.prompts((9,) * count, 100 + seed)]
        most = max(most, changed(model.beside(steady, beside)[0], alone))
    return most


def changed(found: Sequence[int], expected: Sequence[int]) -> int:
    """Places with another token."""
    return sum(one != other for one, other in zip(found, expected, strict=True))


def others(model: Served) -> st.SearchStrategy[list[tuple[int, Inputs]]]:
    """Returns up to four requests, each with the steps of the steady answer after which it comes."""
    when = st.one_of(st.just(BEFORE), st.integers(0, 12))
    return st.lists(st.tuples(when, requests(model.opened.limits, model.beams)), min_size=1, max_size=4)


def test_neither_a_model_nor_its_draft_is_opened_for_bfloat16_that_the_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.standalone.openvino_request.computes_bf16", lambda core: False)
    half = {**PROPERTIES, "ATTENTION_BACKEND": MODES["paged"], "INFERENCE_PRECISION_HINT": "bf16"}
    proposals = {"proposals": json.dumps({"tokens": 3, "draft": True, "properties": half})}
    files = tiny_language.genai_folder("llama")
    folder = _version("bf16", genai.GENAI, files)
    (folder / genai.DRAFT).symlink_to(files)
    with pytest.warns(UserWarning, match="no bfloat16") as warned:
        genai.open_model(folder, {**_settings("paged", half), **proposals})
    assert len(warned) == 2
