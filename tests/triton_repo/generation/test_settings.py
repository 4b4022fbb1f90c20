"""The settings of a request mean what those of the evaluated engine mean; what an engine cannot do is refused before it is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino_genai
import pytest

from export.engines import openvino_genai as engine
from export.engines import own_rules
from foundation.core.decoding import Decoding
from tests.triton_repo.generation.test_engine import Client, Counter, counting, told
from tests.triton_repo.generation.test_engine import submit as submitted
from triton_repo.generation.served.answer import Answer
from triton_repo.generation.served.engine import generation_config
from triton_repo.generation.served.request import FIELDS, WRONG, Limits, Refused, Request, read
from triton_repo.generation.served.searching import rules_of

CASES: tuple[dict[str, Any], ...] = (
    {},
    {"max_tokens": 1, "repetition_penalty": 1000.0},
    {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 7},
    {"temperature": 100.0, "seed": 2**63 - 1},
    {"beams": 64, "answers": 64, "length_penalty": 0.5},
    {"presence_penalty": -1.5, "frequency_penalty": 100.0, "repetition_penalty": 1e-3},
)
NAMES = ("max_new_tokens", "eos_token_id", "repetition_penalty", "presence_penalty", "frequency_penalty", "do_sample", "temperature")
NAMES += ("rng_seed", "top_p", "min_p", "top_k", "num_beams", "num_return_sequences", "length_penalty", "stop_token_ids")


def answer(**given: Any) -> Answer:
    values = {field.name: field.default for field in FIELDS} | {"MAX_TOKENS": 128, "TIMEOUT_SECONDS": 60.0}
    values |= {name.upper(): value for name, value in given.items()}
    return Answer(Request(np.array([5]), values, (), ()), Client(), lambda ids: "", 0)


@pytest.mark.parametrize("case", CASES)
def test_a_request_and_the_evaluated_engine_mean_the_same(case: dict[str, Any]) -> None:
    ours, theirs = rules_of(answer(**case), (2,), first=4), own_rules.rules_of(Decoding(**case), (2,), first=4)
    assert ours == theirs
    if not case.keys() & {"presence_penalty"}:
        model = openvino_genai.GenerationConfig()
        model.eos_token_id, model.stop_token_ids = 2, {2, 9}
        served, evaluated = generation_config(answer(**case), model), engine.generation_config(Decoding(**case), model)
        assert {name: getattr(served, name) for name in NAMES} == {name: getattr(evaluated, name) for name in NAMES}


@pytest.mark.parametrize("name", ["PRESENCE_PENALTY", "FREQUENCY_PENALTY"])
def test_a_penalty_that_the_engine_gets_wrong_is_refused(name: str) -> None:
    limits = Limits(context=64, vocabulary=100, seconds=30.0, chat=False, beams=True, subtracts=False)
    for value in (0.5, -2.0, 100.0):
        with pytest.raises(Refused, match=rf"{name}: {value:g} given; 0 is .*give REPETITION_PENALTY") as caught:
            read({"INPUT_IDS": np.array([5]), name: np.array([value], np.float32)}, limits, None)  # type: ignore[arg-type]
        assert caught.value.code == WRONG
    assert read({"INPUT_IDS": np.array([5]), name: np.zeros(1, np.float32)}, limits, None).values[name] == 0  # type: ignore[arg-type]


def test_what_the_library_does_not_take_is_the_fault_of_the_request() -> None:
    """Never an error of the model, after which the engine is made anew."""
    with pytest.raises(Refused, match=r"GenAI does not take this request: .*repetition_penalty") as caught:
        generation_config(answer(repetition_penalty=-1.0), openvino_genai.GenerationConfig())
    assert caught.value.code == WRONG


def test_a_request_that_is_refused_as_it_begins_hurts_nobody() -> None:
    with counting() as one:
        one.let.clear()
        beside = submitted(one)
        one.error_of_begin = refusing(one)
        wrong = submitted(one)
        one.let.set()
        assert wrong.over.wait(10)
        assert wrong.refused == ("TEMPERATURE: no", WRONG)
        assert told(beside) == ("abc", "length")
        assert one.renewed == 0


def refusing(one: Counter) -> Any:
    def fail() -> None:
        if len(one._running()) == 1:
            raise Refused("TEMPERATURE: no")

    return fail
