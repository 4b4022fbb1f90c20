"""Every setting of every engine against one written-out reference, `foundation.standalone.decoding_rules`: alone, combined, at its limits.

Greedy answers are compared token by token. Of sampled ones every token has to be one that the reference may draw there, and all of them
together have to be as likely as draws from it are: the sum of log p(token) less its expectation, in standard deviations.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import openvino
import pytest
import torch

from export.engines.openvino_genai import OpenVinoGenai, generation_config
from export.engines.own_rules import rules_of
from export.engines.spec import EngineSpec
from export.engines.torch import Torch
from foundation.core.decoding import LEAST_TEMPERATURE, Decoding
from foundation.core.errors import InputError
from foundation.core.speculation import Speculation
from foundation.models.checkpoint import load_float
from foundation.standalone.decoding_rules import Text, limited, penalized, softmax
from tests.export.engines.test_onnxruntime_decoder import engine as fused
from tests.export.engines.test_openvino_genai import engine as genai
from tests.export.engines.test_openvino_genai import spec
from tests.export.engines.test_openvino_seq2seq import engine as seq2seq
from tests.export.engines.test_openvino_seq2seq import in_torch
from tests.export.generation import tiny_encoder_decoders
from tests.export.generation.genai_checkpoints import checkpoint, prompts
from triton_repo.generation.served.request import FIELDS

pytestmark = pytest.mark.whole

TOKENS, SEEDS = 12, 2
DRAWN, DRAWN_IN_TORCH = 24, 8
LIMIT = 3.5
"""Standard deviations; the seeds are fixed, so that a test that passes once passes again."""
GREEDY: tuple[dict[str, float], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1e-3},
    {"repetition_penalty": 1000.0},
    {"presence_penalty": 2.0},
    {"presence_penalty": -100.0},
    {"frequency_penalty": 2.0},
    {"frequency_penalty": 100.0},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 0.9, "presence_penalty": 1.5, "frequency_penalty": -0.2},
)
SAMPLED: tuple[dict[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 100.0},
    {"temperature": LEAST_TEMPERATURE},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.6},
    {"temperature": 0.7, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.999, "top_k": 10_000_000},
    {"temperature": 1.2, "top_k": 12, "top_p": 0.7},  # top-p of what top-k leaves: in the other order more tokens stay
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.3},
    {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
)
DECODERS = ("torch", "paged", "stateful", "looked up", "onnxruntime")
ENCODER_DECODERS = ("torch t5", "seq2seq")


@cache
def engine(name: str) -> Any:
    if name == "torch":
        path = str(checkpoint("llama"))
        return Torch(EngineSpec("torch", "eager", "fp32", "fp32", "cpu", 1, path, path))
    if name == "looked up":
        return OpenVinoGenai(replace(spec("llama"), speculation=Speculation(4)))
    makers = {"onnxruntime": lambda: fused("llama"), "seq2seq": lambda: seq2seq("t5"), "torch t5": lambda: in_torch("t5")}
    return makers[name]() if name in makers else genai("llama", None, name)


@cache
def model(encodes: bool) -> Any:
    return load_float(tiny_encoder_decoders.checkpoint("t5") if encodes else checkpoint("llama"))


def prompt(encodes: bool) -> np.ndarray:
    return tiny_encoder_decoders.sources((9,))[0] if encodes else prompts((9,))[0]


def read_before(encodes: bool) -> list[int]:
    """What stands before the answer for the penalties."""
    return [tiny_encoder_decoders.START] if encodes else prompt(encodes).tolist()


def logits(encodes: bool, answer: list[int]) -> np.ndarray:
    """Logits of Transformers behind every token of an answer and before its first, float32 [1 + n, V]."""
    asked = torch.from_numpy(prompt(encodes).astype(np.int64))[None]
    before = read_before(encodes)
    written = torch.tensor([[*before, *answer]])
    given = {"input_ids": asked, "decoder_input_ids": written} if encodes else {"input_ids": written}
    with torch.no_grad():
        found: np.ndarray = model(encodes)(**given).logits[0, len(before) - 1 :].numpy()
    return found


@cache
def greedy(encodes: bool, case: tuple[tuple[str, float], ...]) -> list[int]:
    """The answer of the reference."""
    *before, start = read_before(encodes)
    text = Text(rules_of(Decoding(max_tokens=TOKENS, ignore_end=True, **dict(case)), ()), start, before=before)  # type: ignore[arg-type]
    while text.ended is None:
        text.take(logits(encodes, text.tokens)[-1])
    return text.tokens


def refused(name: str, case: dict[str, float]) -> bool:
    return name in ("paged", "stateful", "looked up") and bool({"presence_penalty", "frequency_penalty"} & case.keys())


@pytest.mark.first(1)
@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS])
def test_greedy_answers_are_those_of_the_reference(name: str) -> None:
    encodes = name in ENCODER_DECODERS
    for case in GREEDY:
        decoding = Decoding(max_tokens=TOKENS, ignore_end=True, **case)  # type: ignore[arg-type]
        if refused(name, case):
            with pytest.raises(InputError, match=r"(presence|frequency)_penalty: .* given; 0 is allowed"):
                engine(name).generate([prompt(encodes)], decoding)
            continue
        (answer,) = engine(name).generate([prompt(encodes)], decoding)
        assert list(answer.tokens[0]) == greedy(encodes, tuple(case.items())), case


@pytest.mark.first(1)
@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS])
def test_draws_are_draws_from_the_reference(name: str) -> None:
    encodes = name in ENCODER_DECODERS
    for case in SAMPLED:
        given = {key: value for key, value in case.items() if not refused(name, {key: value})}
        away, variance = 0.0, 0.0
        for seed in range(SEEDS):
            drawn = DRAWN_IN_TORCH if name.startswith("torch") else DRAWN
            decoding = Decoding(max_tokens=drawn, ignore_end=True, seed=seed, **given)  # type: ignore[arg-type]
            (answer,) = engine(name).generate([prompt(encodes)], decoding)
            tokens = list(answer.tokens[0])
            for at, row in enumerate(logits(encodes, tokens[:-1])):
                rules = rules_of(decoding, ())
                scores = penalized(row, read_before(encodes), tokens[:at], rules).astype(np.float64) / rules.temperature
                chances = softmax(limited(scores, rules))
                assert chances[tokens[at]] > 0, (case, seed, at)
                surprise = -np.log(chances, out=np.zeros_like(chances), where=chances > 0)
                mean = (chances * surprise).sum()
                away += surprise[tokens[at]] - mean
                variance += (chances * (surprise - mean) ** 2).sum()
        assert abs(away) <= LIMIT * np.sqrt(variance) + 1e-6, (case, away / np.sqrt(variance))


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_openvino_genai_adds_these_penalties_to_negative_logits(name: str) -> None:
    """Why they are refused; once this fails, they need not be any more."""
    whole = Decoding(max_tokens=32, ignore_end=True)
    pipeline, found, right, wrong = genai("llama", None, "paged")._paged_pipeline, [], [], []
    for number, asked in enumerate(prompts((3, 9, 20, 5, 7, 12))):
        config = generation_config(whole, pipeline.get_config())
        setattr(config, name, 2.0)
        handle = pipeline.add_request(1000 + number, openvino.Tensor(asked[None].astype(np.int64)), config)
        while pipeline.has_non_finished_requests():
            pipeline.step()
        found.append(list(handle.read_all()[0].generated_ids))
        right.append(penalized_answer(asked, name, lambda row: np.full_like(row, -2.0)))
        wrong.append(penalized_answer(asked, name, lambda row: np.where(row < 0, 2.0, -2.0)))
    assert found == wrong
    assert sum(one == other for one, other in zip(found, right, strict=True)) < 3


def penalized_answer(asked: np.ndarray, name: str, change: Any) -> list[int]:
    """The greedy answer where the logits of its own tokens are changed, for each time or once."""
    tokens: list[int] = []
    for _ in range(32):
        with torch.no_grad():
            row = model(False)(input_ids=torch.tensor([[*asked.tolist(), *tokens]])).logits[0, -1].numpy()
        count = np.bincount(tokens, minlength=len(row))
        times = (count > 0) if name == "presence_penalty" else count
        tokens.append(int((row + times * change(row)).argmax()))
    return tokens


def test_requests_and_decodings_have_the_same_limits() -> None:
    """The server reads its fields without our package."""
    known = {field.name.lower(): field for field in FIELDS}
    given = {"max_tokens": 1_000_000, "temperature": 100, "top_k": 10_000_000, "top_p": 1e-6, "min_p": 0.999}
    given |= {"repetition_penalty": 1000, "presence_penalty": 100, "frequency_penalty": -100, "seed": 2**63 - 1}
    assert given.keys() == known.keys() & {field.name for field in fields(Decoding)} - {"beams", "answers", "length_penalty"}
    for name, value in given.items():
        field = known[name]
        kind = np.float32 if field.datatype == "TYPE_FP32" else np.int64
        assert field.read(np.array([value], kind)) == pytest.approx(value)
        if name == "max_tokens":
            continue  # a request is held against the context of its model
        beyond = field.high if value > 0 and value != field.low else field.low
        assert beyond == value
        Decoding(**{name: value})
        with pytest.raises(InputError, match=name):
            Decoding(**{name: value * 1.01 if abs(value) >= 1 else value * (1.01 if value > 0.1 else 0.9)})
    assert known["temperature"].least == LEAST_TEMPERATURE
    assert known["temperature"].read(np.array([LEAST_TEMPERATURE], np.float32)) == pytest.approx(LEAST_TEMPERATURE)
