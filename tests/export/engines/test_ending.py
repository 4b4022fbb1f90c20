"""Where an answer ends in every engine: behind its end token, or with the token that completes a stop text, inside of it or not."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from export.engines.ending import Ending
from export.engines.onnxruntime_decoder import MODE, OnnxRuntimeDecoder
from export.engines.onnxruntime_decoder import MODEL as FUSED
from export.engines.onnxruntime_decoder import properties as of_onnx
from export.engines.openvino_genai import BACKEND, BACKENDS, OpenVinoGenai, properties
from export.engines.spec import EngineSpec
from export.engines.torch import Torch
from export.generation.fused_folder import write_fused_folder
from export.generation.genai_folder import MODEL, write_genai_folder
from export.generation.on_grids import on_grids
from foundation.core.decoding import Decoding
from foundation.core.errors import InputError
from foundation.core.speculation import Speculation
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.models.library import quiet
from foundation.standalone.language_text import LanguageText, TextSettings
from foundation.standalone.pieces import Pieces
from tests.export.generation.genai_checkpoints import checkpoint, prompts
from tests.export.generation.tiny_decoders import VOCABULARY

LETTERS = "abcdefgh"


@pytest.mark.parametrize(
    ("answer", "tokens", "texts", "taken", "ended"),
    [
        ([0, 1, 2], (), (), [0, 1, 2], False),
        ([0, 1, 2, 1], (1,), (), [0, 1], True),
        ([0, 1, 2, 3], (), ("bc",), [0, 1, 2], True),
        ([0, 1, 2, 3], (3,), ("b",), [0, 1], True),
        ([0, 1, 2], (0,), ("b",), [0], True),  # the text stands behind the end
        ([0, 1], (5,), ("bc",), [0, 1], False),
        ([2, 0, 1], (), ("zb", "ab"), [2, 0, 1], True),
    ],
)
def test_what_comes_first_ends_it(
    answer: list[int], tokens: tuple[int, ...], texts: tuple[str, ...], taken: list[int], ended: bool
) -> None:
    reads = {letter: at for at, letter in enumerate(LETTERS)}
    made = Tokenizer(models.BPE(reads, [], unk_token="a"))
    made.decoder = decoders.ByteLevel()
    text = LanguageText(made, TextSettings())
    for sizes in ([1] * len(answer), [len(answer)], [2, len(answer)]):
        one, found, at = Ending(tokens, texts, lambda: text), list[int](), 0
        for size in sizes:
            found += one.take(answer[at : at + size])
            at += size
        assert (found, one.ended) == (taken, ended)


def test_a_text_does_not_end_a_search() -> None:
    with pytest.raises(InputError, match=r"stop: 'a' given with 2 beams; .*give stop_tokens, or 1 beam"):
        Decoding(beams=2, stop=("a",))


def words() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens have three letters each, so that a stop text begins and ends within them."""
    alphabet = "abcdefghijklm"
    made = {f"{alphabet[at % 13]}{alphabet[at // 13]}{alphabet[(3 * at) % 11]}": at for at in range(VOCABULARY)}
    letters = {letter: VOCABULARY + at for at, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE({**made, **letters}, [], unk_token="aaa"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="aaa", pad_token="aaa", bos_token="aaa")


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="tiny-ending-"))


@cache
def engine(name: str) -> Any:
    """An engine of the tiny Llama with these words."""
    source = folder() / "checkpoint"
    if not source.exists():
        with quiet():
            load_float(checkpoint("llama")).save_pretrained(source)
        words().save_pretrained(source)
    if name == "torch":
        return Torch(EngineSpec("torch", "eager", "fp32", "fp32", "cpu", 1, str(source), str(source)))
    path = folder() / ("onnx" if name == "onnxruntime" else "genai")
    if name == "onnxruntime":
        write_fused_folder(Checkpoint(source), path)
        return OnnxRuntimeDecoder(
            EngineSpec("onnxruntime_decoder", MODE, "fp32", "fp32", "cpu", 1, str(path / FUSED), str(source), (1,), of_onnx(1))
        )
    if not path.exists():
        write_genai_folder(on_grids(Checkpoint(source)), path, {})
    mode = "stateful" if name == "stateful" else "paged"
    given = {**properties(1, "fp32", "fp32"), BACKEND: BACKENDS[mode]}
    spec = EngineSpec("openvino_genai", mode, "fp32", "fp32", "cpu", 1, str(path / MODEL), str(source), (1,), given)
    return OpenVinoGenai(replace(spec, speculation=Speculation(4)) if name == "looked up" else spec)


@pytest.mark.whole
def test_every_engine_ends_an_answer_at_the_same_letter() -> None:
    (prompt,), greedy = prompts((9,)), Decoding(max_tokens=12, repetition_penalty=3.0, ignore_end=True)
    whole = list(engine("torch").generate([prompt], greedy)[0].tokens[0])
    text = words().decode(whole)
    assert len(text) == 3 * len(whole)
    for begins, size in ((0, 2), (1, 1), (4, 1), (7, 4), (10, 5), (16, 2), (5, 9)):
        stop = text[begins : begins + size]
        at = text.index(stop)
        expected = whole[: (at + size + 2) // 3]  # up to the token that completes it
        for name in ("torch", "paged", "stateful", "looked up", "onnxruntime"):
            told: list[int] = []
            decoding = replace(greedy, stop=(stop, "never there"))
            (answer,) = engine(name).generate([prompt], decoding, lambda number, tokens, told=told: told.extend(tokens))
            assert list(answer.tokens[0]) == told == expected, (name, stop)
            assert len(answer.seconds) == len(expected)
        pieces = Pieces(lambda ids: str(words().decode(ids)), stop=decoding.stop)
        assert "".join([*(pieces.add([token]) for token in expected), pieces.end()]) == text[:at]
