"""The graph with a cache says what Transformers says: token by token, for one prompt and for several of other lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import pytest
import torch
import transformers
from numpy.typing import NDArray

from export.generation.cached_graph import cached_graph
from foundation.core.errors import InputError
from tests.export.generation.tiny_decoders import CONFIGS, VOCABULARY, decoder
from tests.seldom import seldom

pytestmark = pytest.mark.whole

NEW_TOKENS = 16
PENALTY = 3.0
"""Random models repeat one token, and an error would be lost in that."""
SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


def prompts(lengths: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns random ids and their mask [b, longest], filled up on the left."""
    random = np.random.default_rng(0)
    ids = np.zeros((len(lengths), max(lengths)), np.int64)
    mask = np.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = random.integers(2, VOCABULARY, length), 1
    return ids, mask


class Session:
    """An infer request of a graph; what it was given stays in its cache."""

    def __init__(self, graph: openvino.Model) -> None:
        self._request = openvino.Core().compile_model(graph, "CPU", SETTINGS).create_infer_request()

    def logits(self, ids: NDArray[np.int64], mask: NDArray[np.int64], beams: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Returns logits [b, n, V] of new ids [b, n], where the mask [b, p + n] covers the cache too."""
        given: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :],
            "beam_idx": np.array(range(len(ids)) if beams is None else beams, np.int32),
        }
        self._request.infer(given)
        return np.array(self._request.get_tensor("logits").data)

    def forget(self) -> None:
        """Empties the cache."""
        self._request.reset_state()


def greedy(session: Session, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the likeliest tokens, one after the other, [b, NEW_TOKENS]; those that were there before count for less."""
    session.forget()
    new, seen = ids, np.where(mask == 1, ids, ids[:, -1:])  # padding was not there before
    for _ in range(NEW_TOKENS):
        last = session.logits(new, mask)[:, -1]
        before = np.take_along_axis(last, seen, axis=1)
        np.put_along_axis(last, seen, np.where(before < 0, before * PENALTY, before / PENALTY), axis=1)
        new = last.argmax(axis=-1)[:, None]
        seen, mask = np.concatenate([seen, new], axis=1), np.concatenate([mask, np.ones_like(new)], axis=1)
    return seen[:, ids.shape[1] :]


QUICK = {"bloom", "mistral"}
"""Positions that are biases, and windows, next to padding. `test_openvino_genai` asks seven kinds for their tokens, on the same graphs."""


@pytest.mark.parametrize("kind", seldom(CONFIGS, CONFIGS.keys() - QUICK))
def test_greedy_tokens_are_those_of_transformers(kind: str) -> None:
    model = decoder(kind)
    session = Session(cached_graph(decoder(kind)))
    for lengths in ((7,), (1, 3, 12, 20, 33)):
        ids, mask = prompts(lengths)
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "repetition_penalty": PENALTY}
        expected = model.generate(torch.tensor(ids), attention_mask=torch.tensor(mask), **settings)
        said = expected[:, ids.shape[1] :].numpy()
        assert len(np.unique(said)) > 10, "the model repeats itself: this compares nothing"
        np.testing.assert_array_equal(greedy(session, ids, mask), said)


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["gpt2", "bloom", "mistral"])
def test_a_prompt_may_come_in_pieces(kind: str) -> None:
    model = decoder(kind)
    ids, mask = prompts([19, 19])
    with torch.inference_mode():
        expected = model(torch.tensor(ids)).logits.numpy()
    session = Session(cached_graph(model))
    pieces = [session.logits(ids[:, start:end], mask[:, :end]) for start, end in ((0, 1), (1, 9), (9, 10), (10, 19))]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), expected, rtol=1e-3, atol=1e-3)


def test_rows_go_on_from_the_beam_that_is_named() -> None:
    model = decoder("llama")
    ids, mask = prompts([6, 6, 6])
    new = np.array([[5], [6], [7]])
    beams = [2, 0, 0]
    with torch.inference_mode():
        expected = model(torch.tensor(np.concatenate([ids[beams], new], axis=1))).logits[:, -1].numpy()
    session = Session(cached_graph(model))
    session.logits(ids, mask)
    said = session.logits(new, np.ones((3, 7), np.int64), beams)[:, -1]
    np.testing.assert_allclose(said, expected, rtol=1e-3, atol=1e-3)


def test_the_cache_is_state_and_no_input() -> None:
    graph = cached_graph(decoder("llama"))
    assert {value.any_name for value in graph.inputs} == {"input_ids", "attention_mask", "position_ids", "beam_idx"}
    assert [value.any_name for value in graph.outputs] == ["logits"]
    assert len(graph.get_variables()) == 4  # keys and values of two layers
    assert {str(one.get_info().data_shape) for one in graph.get_variables()} == {"[?,2,?,16]"}


@pytest.mark.parametrize("kind", seldom(CONFIGS, CONFIGS.keys() - {"gpt2", "llama", "gemma2"}))
def test_the_product_of_the_head_is_where_pipelines_look_for_it(kind: str) -> None:
    """They cut what it reads to the last position; the graph by itself gives the logits of all."""
    node = cached_graph(decoder(kind)).output("logits").get_node().input_value(0).get_node()
    names = [node.get_type_name()]
    while names[-1] != "MatMul" and len(names) < 4:
        node = node.input_value(0).get_node()
        names.append(node.get_type_name())
    assert names == (["Multiply", "Tanh", "Divide", "MatMul"] if kind == "gemma2" else ["MatMul"])


def test_a_model_that_keeps_no_keys_is_refused() -> None:
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=VOCABULARY, state_size=4)
    with pytest.raises(InputError, match="keeps keys and values of every layer; this mamba"):
        cached_graph(transformers.AutoModelForCausalLM.from_config(config).eval())
