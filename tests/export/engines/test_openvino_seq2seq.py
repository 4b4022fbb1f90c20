"""OpenVINO on tiny encoder-decoders: its tokens and searches are those of Transformers, its integers those of the checkpoint."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from export.engines.openvino_genai import properties
from export.engines.openvino_seq2seq import GROUP, OpenVinoSeq2Seq
from export.engines.spec import EngineSpec
from export.engines.torch import Torch
from export.generation.prompts import ENDED, Prompts, greedy
from foundation.core.decoding import Decoding
from foundation.labels.next_token import answers_of, labels_of, perplexity
from foundation.models.checkpoint import load, load_float
from foundation.standalone.encoder_decoder import DECODER, EncoderDecoder
from foundation.standalone.preprocess import TokenPair
from tests.export.generation.genai_checkpoints import tokenizer
from tests.export.generation.test_codes import ZERO_POINTS
from tests.export.generation.tiny_encoder_decoders import CONFIGS, FIRST, VOCABULARY, checkpoint, folder, preprocessor, sources
from tests.seldom import seldom

pytestmark = pytest.mark.whole

SCHEMES = (None, "w8a8", "w8a8-dynamic", "w4a16", ZERO_POINTS)
QUICK = {("t5", None), ("t5", ZERO_POINTS), ("bart", "w8a8")}
"""Symmetric int4 is a case of zero points; biases and positions, which bart has on top, meet int8 here and float in the answers of mbart.
How each scheme goes into graphs is asked of decoders (test_codes, test_openvino_genai)."""
CASES = [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in product(("t5", "bart"), SCHEMES)]
TOLD = {None: "fp32", "w8a8": "int8", "w8a8-dynamic": "w8a16", "w4a16": "w4a16", ZERO_POINTS: "w4a16"}
"""What the products of a scheme run in."""
TOKENS = 16
PENALTY = 3.0
"""Random models repeat one token for ever, which would hide errors."""


def spec(kind: str, scheme: str | None = None) -> EngineSpec:
    given = {**properties(1, "fp32", "fp32"), "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    precision = {None: "fp32", "w8a8": "int8", "w8a8-dynamic": "int8-dynamic", "w4a16": "w4a16", ZERO_POINTS: "w4a16"}[scheme]
    path = str(folder(kind, scheme) / DECODER)
    return EngineSpec("openvino_seq2seq", "stateful", precision, "fp32", "cpu", 1, path, str(checkpoint(kind, scheme)), (1,), given)


def engine(kind: str, scheme: str | None = None) -> OpenVinoSeq2Seq:
    return _engine(kind, scheme)


@cache
def _engine(kind: str, scheme: str | None) -> OpenVinoSeq2Seq:
    return OpenVinoSeq2Seq(spec(kind, scheme))


@cache
def in_torch(kind: str) -> Torch:
    path = str(checkpoint(kind))
    return Torch(EngineSpec("torch", "eager", "fp32", "fp32", "cpu", 1, path, path))


@cache
def loaded(kind: str) -> Any:
    return load_float(checkpoint(kind))


def in_transformers(kind: str, source: np.ndarray, **settings: Any) -> list[list[int]]:
    ids = torch.from_numpy(source.astype(np.int64))[None]
    usual = {"max_new_tokens": TOKENS, "do_sample": False, "repetition_penalty": PENALTY, "pad_token_id": 0}
    with torch.no_grad():
        model = loaded(kind)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())  # its own has as many layers as the encoder
        given = {**usual, "use_cache": True, "past_key_values": cache, **settings}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    answers: list[list[int]] = found[:, 1:].tolist()
    return answers


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", seldom(CONFIGS, CONFIGS.keys() - {"t5", "marian", "mbart"}))
def test_greedy_tokens_are_those_of_transformers(kind: str) -> None:
    decoding = Decoding(max_tokens=TOKENS, repetition_penalty=PENALTY, ignore_end=True)
    for asked in (sources((9,)), sources((1, 12, 33), seed=1)):
        answers = engine(kind).generate(asked, decoding)
        assert [len(answer.seconds) for answer in answers] == [TOKENS] * len(asked)
        for source, answer in zip(asked, answers, strict=True):
            assert [list(one) for one in answer.tokens] == in_transformers(kind, source, eos_token_id=[2**31 - 1])
            assert len(set(answer.tokens[0])) > 3  # or equality would prove little
            assert list(answer.seconds) == sorted(answer.seconds)
    first, second = (answer.tokens for answer in answers[:2])
    assert first != second  # the source is read


@pytest.mark.parametrize("beams", seldom([2, 4], [2]))
@pytest.mark.parametrize("kind", ["t5", "mbart"])
def test_searches_are_those_of_transformers(kind: str, beams: int) -> None:
    ends = tuple(range(40, 60))
    for number, source in enumerate(sources((1, 6, 17), seed=2)):
        penalty = (0.0, 1.0, 2.0)[number]
        decoding = Decoding(
            max_tokens=14, repetition_penalty=PENALTY, stop_tokens=ends, beams=beams, answers=beams, length_penalty=penalty, ignore_end=True
        )
        settings = {"max_new_tokens": 14, "num_beams": beams, "num_return_sequences": beams, "length_penalty": penalty}
        expected = in_transformers(kind, source, eos_token_id=list(ends), **settings)
        expected = [row[: next((at for at, token in enumerate(row) if token in ends), len(row) - 1) + 1] for row in expected]
        for found in (engine(kind), in_torch(kind)):
            (answer,) = found.generate([source], decoding)
            assert [list(one) for one in answer.tokens] == expected


def test_answers_end_apart_and_leave_the_others_alone() -> None:
    ends, asked = tuple(range(20, 60)), sources((5,) * (GROUP + 3), seed=3)
    decoding = Decoding(max_tokens=30, repetition_penalty=PENALTY, stop_tokens=ends)
    told: dict[int, list[int]] = {}
    answers = engine("t5").generate(asked, decoding, lambda number, tokens: told.setdefault(number, []).extend(tokens))
    lengths = {len(answer.tokens[0]) for answer in answers}
    assert len(lengths) > 2  # they end at different steps
    for number, (source, answer) in enumerate(zip(asked, answers, strict=True)):
        (alone,) = engine("t5").generate([source], decoding)
        assert answer.tokens == alone.tokens
        assert told[number] == list(answer.tokens[0])


def test_torch_answers_alike_with_stop_texts_and_the_first_token_of_the_model() -> None:
    asked = sources((4, 11, 2), seed=5)
    (free,) = engine("mbart").generate(asked[:1], Decoding(max_tokens=12, repetition_penalty=PENALTY, ignore_end=True))
    assert free.tokens[0][0] == FIRST
    text = tokenizer().decode(list(free.tokens[0][4:6]))
    for decoding in (Decoding(max_tokens=12, repetition_penalty=PENALTY, ignore_end=True, stop=(text,)), Decoding(max_tokens=12)):
        ours, theirs = (found.generate(asked, decoding) for found in (engine("mbart"), in_torch("mbart")))
        assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
    stopped = engine("mbart").generate(asked[:1], Decoding(max_tokens=12, repetition_penalty=PENALTY, ignore_end=True, stop=(text,)))
    assert stopped[0].tokens[0] == free.tokens[0][: len(stopped[0].tokens[0])]
    assert len(stopped[0].tokens[0]) < 12


def test_greedy_answers_to_padded_sources_are_those_alone() -> None:
    asked = sources((3, 14, 8, 1), seed=6)
    found = greedy(load_float(checkpoint("t5")), Prompts(tuple(asked), 12, tuple(asked)))
    answers = engine("t5").generate(asked, Decoding(max_tokens=12))
    for row, answer in zip(found, answers, strict=True):
        assert row[row != ENDED].tolist() == list(answer.tokens[0])


@pytest.mark.parametrize("kind", seldom(["t5", "bart"], ["bart"]))
def test_perplexity_through_the_cache_is_that_of_whole_targets(kind: str) -> None:
    model: Any = load_float(checkpoint(kind))
    asked = sources((9,) * 8)
    likely = greedy(model, Prompts(tuple(asked), 20, references=tuple(asked)))
    rows = [TokenPair(source, answer[answer != ENDED]) for source, answer in zip(asked, likely, strict=True)]
    features = preprocessor().encode(rows)
    labels = labels_of(rows, 20).array
    with torch.no_grad():
        given = {name: torch.from_numpy(value) for name, value in features.items()}
        whole = model(**given, use_cache=False).logits.numpy()
    expected, found = (perplexity(answers_of(rows, logits, 20), labels) for logits in (whole, engine(kind).predict(features)))
    assert expected < 0.9 * VOCABULARY  # the model knows its own words, or equality would prove little
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_logits_of_whole_targets_come_through_the_cache(kind: str, scheme: str | None) -> None:
    rows = [TokenPair(source, target) for source, target in zip(sources((3, 9, 12)), sources((7, 1, 11), seed=1), strict=True)]
    features = preprocessor().encode(rows)
    with torch.no_grad():
        reference: Any = load_float(checkpoint(kind, scheme)) if scheme == "w8a8-dynamic" else load(checkpoint(kind, scheme))
        expected = reference(**{name: torch.from_numpy(value) for name, value in features.items()}).logits.numpy()
    found = engine(kind, scheme).predict(features)
    for row, one, other in zip(rows, found, expected, strict=True):
        read = len(row.target) + 1  # behind it stands padding
        np.testing.assert_allclose(one[:read], other[:read], atol=5e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(engine(kind, scheme).predict(features), found)  # nothing is left in the cache


@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_the_engine_tells_what_each_product_runs_in(kind: str, scheme: str | None) -> None:
    model: Any = load_float(checkpoint(kind))
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != head]
    told = engine(kind, scheme).precisions([*(f"{name}/MatMul" for name in names), f"{head}/MatMul"], 1, 8)
    assert {told.get(f"{name}/MatMul") for name in names} == {TOLD[scheme]}
    assert told[f"{head}/MatMul"] == "fp32"
    assert len(names) < VOCABULARY


def test_graphs_are_not_compiled_for_bfloat16_that_the_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.standalone.openvino_request.computes_bf16", lambda core: False)
    with pytest.warns(UserWarning, match="no bfloat16"):
        opened = EncoderDecoder(folder("t5", None), properties(1, "bf16", "fp32"), 0)
    told = [one.get_property("INFERENCE_PRECISION_HINT").get_type_name() for one in (opened.encoder, opened.decoder)]
    assert told == ["f32", "f32"]
