"""Positions that depend on the longest text read at once: known by what the graph computes, and served where they are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openvino
import pytest
import torch
import transformers

from export.choices import Generation
from export.engines.openvino_genai import BACKEND, BACKENDS, OpenVinoGenai, properties
from export.engines.spec import EngineSpec
from export.generation.cached_graph import cached_graph
from export.generation.decoder_parts import parts_of
from export.generation.genai_folder import MODEL, paged_obstacle, write_genai_folder
from export.generation.on_grids import on_grids
from export.generation.positions import looks_ahead
from export.generation.prompts import Prompts, greedy
from export.generation.rereading import original_positions, read_again_at
from foundation.core.decoding import Decoding
from foundation.core.errors import InputError
from foundation.measure.tokens import compare_tokens
from foundation.models.folder import Checkpoint
from foundation.standalone.stretches import FILE, stretches
from tests.export.generation.genai_checkpoints import tokenizer
from tests.export.generation.tiny_decoders import GROUPED, TOKENS, VOCABULARY, with_spread_weights

pytestmark = pytest.mark.whole

CONTEXT, ORIGINAL, HALF = 1024, 40, 8
SHAPE: dict[str, Any] = {**GROUPED, "max_position_embeddings": CONTEXT}
FACTORS = {"short_factor": [1.0] * HALF, "long_factor": [1.0 + 3 * place for place in range(HALF)]}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LONG = rope("longrope", original_max_position_embeddings=ORIGINAL, factor=CONTEXT / ORIGINAL, **FACTORS)
AHEAD: dict[str, Callable[[], Any]] = {
    "longrope": lambda: transformers.LlamaConfig(**LONG, **SHAPE),
    "longrope, phi3": lambda: transformers.Phi3Config(original_max_position_embeddings=ORIGINAL, **LONG, **SHAPE),
}
BACK: dict[str, Callable[[], Any]] = {
    "default": lambda: transformers.LlamaConfig(**SHAPE),
    "dynamic": lambda: transformers.LlamaConfig(**rope("dynamic", factor=4.0), **SHAPE),  # up to the context as the default
    "yarn": lambda: transformers.LlamaConfig(**rope("yarn", factor=8.0, original_max_position_embeddings=ORIGINAL), **SHAPE),
    "longrope that stays short": lambda: transformers.LlamaConfig(**LONG, **{**SHAPE, "max_position_embeddings": ORIGINAL}),
    "learned": lambda: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, **TOKENS),
    "alibi": lambda: transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, **TOKENS),
}


@cache
def model(kind: str) -> Any:
    return with_spread_weights({**AHEAD, **BACK}[kind]())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What OpenVINO GenAI reads of the first model of `AHEAD`, but for a tokenizer."""
    path = tmp_path_factory.mktemp("longrope")
    openvino.save_model(cached_graph(model("longrope")), path / MODEL, compress_to_fp16=False)
    model("longrope").config.save_pretrained(path)
    transformers.GenerationConfig(bos_token_id=1).save_pretrained(path)
    return path


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", [*AHEAD, *BACK])
def test_what_looks_ahead_is_known_by_its_logits(kind: str) -> None:
    context = model(kind).config.get_text_config()
    found = looks_ahead(cached_graph(model(kind)), getattr(context, "max_position_embeddings", CONTEXT), VOCABULARY)
    assert found == (kind in AHEAD)


@pytest.mark.parametrize("kind", ["longrope", "default", "dynamic", "yarn"])
def test_layers_of_llama_are_written_for_onnx_runtime_unless_they_look_ahead(kind: str) -> None:
    if kind in AHEAD:
        with pytest.raises(InputError, match="its rotary embeddings depend on the length of the text"):
            parts_of(model(kind))
    else:
        assert parts_of(model(kind)).context == CONTEXT


def test_the_length_that_positions_are_stretched_from_is_read_from_the_config() -> None:
    assert [original_positions(model(kind).config) for kind in ("longrope", "longrope, phi3", "yarn")] == [ORIGINAL] * 3
    assert [original_positions(model(kind).config) for kind in ("default", "dynamic", "learned")] == [None] * 3


@pytest.mark.parametrize("kind", [*AHEAD, "default", "yarn", "learned"])
def test_texts_are_read_again_where_transformers_reads_them_again(kind: str) -> None:
    assert read_again_at(model(kind)) == (ORIGINAL + 1 if kind == "longrope, phi3" else None)


@pytest.mark.parametrize(
    ("prompt", "most", "again", "expected"),
    [
        (36, 14, None, (14,)),
        (36, 14, 41, (5, 9)),
        (40, 14, 41, (1, 13)),
        (41, 14, 41, (14,)),
        (50, 14, 41, (14,)),
        (36, 5, 41, (5,)),
        (36, 6, 41, (5, 1)),
    ],
)
def test_an_answer_has_a_stretch_before_and_behind_the_length(prompt: int, most: int, again: int | None, expected: tuple[int, ...]) -> None:
    assert stretches(prompt, most, again) == expected


def test_answers_that_cross_the_length_are_those_of_transformers(tmp_path: Path) -> None:
    known = model("longrope, phi3")
    known.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    write_genai_folder(on_grids(Checkpoint(tmp_path / "model")), tmp_path / "genai", {})
    random = np.random.default_rng(2)
    rows = [random.integers(3, VOCABULARY, length).astype(np.int32) for length in (36, ORIGINAL, ORIGINAL + 1, 30)]
    expected = []
    for row in rows:
        ids = torch.from_numpy(row.astype(np.int64))[None]
        whole = known.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False, pad_token_id=0)
        expected.append(whole[0, len(row) :].tolist())
    assert answers(tmp_path / "genai", "stateful", rows, 14) == expected
    assert greedy(known, Prompts(tuple(rows), 14)).tolist() == expected
    (tmp_path / "genai" / FILE).unlink()
    assert answers(tmp_path / "genai", "stateful", rows, 14) != expected  # what the library does by itself


def answers(folder: Path, mode: str, rows: list[np.ndarray], tokens: int = 8) -> list[list[int]]:
    given = {**properties(1, "fp32", "fp32"), "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", BACKEND: BACKENDS[mode]}
    spec = EngineSpec("openvino_genai", mode, "fp32", "fp32", "cpu", 1, str(folder / MODEL), str(folder), (1,), given)
    found = OpenVinoGenai(spec).generate(rows, Decoding(max_tokens=tokens, ignore_end=True))
    return [list(answer.tokens[0]) for answer in found]


def test_short_and_long_prompts_are_answered_right_in_the_mode_that_is_left(folder: Path) -> None:
    obstacle = paged_obstacle(folder)
    assert obstacle is not None
    assert "longest text" in obstacle
    random = np.random.default_rng(0)  # short, longer than a part of 256 tokens, longer than the original positions
    rows = [random.integers(3, VOCABULARY, length).astype(np.int32) for length in (20, 300, ORIGINAL + 5)]
    expected = greedy(model("longrope"), Prompts(tuple(rows), 8)).tolist()
    assert answers(folder, "stateful", rows) == expected
    paged = answers(folder, "paged", rows)
    assert paged[1] == expected[1]
    assert paged[0] != expected[0]  # once it is equal, the mode need not be avoided any more


def test_the_gate_sees_an_engine_that_mixes_texts_up(folder: Path) -> None:
    random = np.random.default_rng(1)
    blocks = [random.integers(3, VOCABULARY, 40).astype(np.int32) for _ in range(10)]
    alike = Prompts.of_rows(blocks, Generation(prompts=8, tokens=8), 40)
    mixed = alike.mixed(blocks, CONTEXT, ORIGINAL)
    short, several = (
        compare_tokens(greedy(model("longrope"), asked), np.array(answers(folder, "paged", list(asked.rows)), np.int32))
        for asked in (alike, mixed)
    )
    assert short["passed"]  # starts of blocks alone say nothing
    assert not several["passed"]


def test_the_trained_length_is_found_for_every_kind_of_layer() -> None:
    plain, stretched, more = {"rope_theta": 1e4}, {"original_max_position_embeddings": 64}, {"original_max_position_embeddings": 128.0}
    for rope, expected in (
        (None, None),
        (plain, None),
        (stretched, 64),
        ({"sliding_attention": plain, "full_attention": stretched}, 64),
        ({"sliding_attention": more, "full_attention": stretched}, 128),
    ):
        assert original_positions(SimpleNamespace(rope_parameters=rope)) == expected
