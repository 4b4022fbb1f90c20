"""The engine that answers one request at a time: answers that cross the length at which a text is read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino
import pytest
import torch
import transformers

from export.generation.cached_graph import cached_graph
from foundation.artifacts.artifact import write_json
from foundation.standalone.stretches import FILE, KEY
from tests.export.generation.test_positions import ORIGINAL, model
from tests.export.generation.tiny_decoders import VOCABULARY
from tests.triton_repo.generation.test_engine import Client
from tests.triton_repo.generation.tiny_language import MODES, PROPERTIES
from triton_repo.generation.served.answer import LENGTH, STOP, Answer
from triton_repo.generation.served.request import FIELDS, Request
from triton_repo.generation.served.stateful import Stateful

pytestmark = pytest.mark.whole

TOKENS = 14


def ask(engine: Stateful, prompt: np.ndarray, stop_tokens: tuple[int, ...] = ()) -> tuple[list[int], str]:
    """The tokens of an answer, and why it ended."""
    values = {field.name: field.default for field in FIELDS} | {"MAX_TOKENS": TOKENS, "TIMEOUT_SECONDS": 60.0, "IGNORE_EOS": True}
    client = Client()
    engine.submit(Answer(Request(prompt.astype(np.int64), values, (), stop_tokens), client, lambda ids: "x" * len(ids), 0))
    assert client.over.wait(60)
    assert client.refused is None
    assert client.pieces[-1]["COMPLETION_TOKENS"] == sum(len(piece["TOKENS"]) for piece in client.pieces)
    return [token for piece in client.pieces for token in piece["TOKENS"]], client.pieces[-1]["FINISH_REASON"]


def test_answers_that_cross_the_length_are_those_of_transformers(tmp_path: Path) -> None:
    known = model("longrope, phi3")
    openvino.save_model(cached_graph(known), tmp_path / "openvino_model.xml", compress_to_fp16=False)
    known.config.save_pretrained(tmp_path)
    transformers.GenerationConfig(bos_token_id=1).save_pretrained(tmp_path)
    write_json(tmp_path / FILE, {KEY: ORIGINAL + 1})
    random = np.random.default_rng(2)
    engine = Stateful(tmp_path, {**PROPERTIES, "ATTENTION_BACKEND": MODES["stateful"]}, 4)
    engine.start()
    for length in (36, ORIGINAL, ORIGINAL + 1, 20):
        prompt = random.integers(3, VOCABULARY, length)
        ids = torch.from_numpy(prompt)[None]
        whole = known.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        expected = whole[0, length:].tolist()
        assert ask(engine, prompt) == (expected, LENGTH)
        stop = expected[9]  # in the second stretch of the first prompts
        assert ask(engine, prompt, (stop,)) == (expected[: expected.index(stop) + 1], STOP)
    engine.close()
