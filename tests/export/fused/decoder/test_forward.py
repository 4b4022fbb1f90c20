"""Whole decoders on the kernels: the codes of every layer are torch's, later tokens change nothing, and neither do neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from export.parity.parity import BOUNDARY
from tests.export.fused.decoder import decoders
from tests.export.fused.decoder.decoders import LENGTH, Answers, Shape, Ways
from tests.seldom import seldom

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]
SHAPES = {
    "gpt2": Shape(),
    "llama": Shape("llama"),
    "gpt2, a scale per token": Shape(scheme="w8a8-dynamic"),
    "llama, a scale per token": Shape("llama", "w8a8-dynamic", config={"num_key_value_heads": 1}),
    "mixed gpt2": Shape(floats=("0.attn.c_attn", "1.mlp.c_fc"), smooth=("1.attn.c_attn", "0.mlp.c_proj")),
    "mixed llama": Shape(
        "llama", floats=("0.self_attn.k_proj", "1.mlp.up_proj"), smooth=("0.self_attn.o_proj", "1.mlp.down_proj"),
        uneven=("1.self_attn.q_proj", "0.mlp.gate_proj"),
    ),
    "heads of 96": Shape("llama", config={"head_dim": 96, "num_hidden_layers": 1}),
    "biases, GELU": Shape("llama", config={"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "int8 head": Shape("llama", head=True, config={"num_hidden_layers": 1}),
    "GELU": Shape(config={"activation_function": "gelu", "n_layer": 1}),
}  # fmt: skip
RARE = ("heads of 96", "biases, GELU", "int8 head", "GELU", "mixed gpt2", "llama, a scale per token")


@pytest.mark.first(1)
@pytest.mark.parametrize("name", seldom(SHAPES, RARE))
def test_the_codes_of_every_layer_are_torchs(name: str, interpreted: Interpreted, tmp_path: Path) -> None:
    lengths = [7, 1, 12]
    given = decoders.texts(lengths)
    folder = decoders.checkpoint(tmp_path, SHAPES[name])
    logits, read = decoders.in_torch(folder, given)
    answers: Answers = interpreted(decoders.in_kernels, folder, given)
    same = same_codes(read, answers, lengths)
    assert same.double().mean() > 0.7  # of a token whose code lies on a boundary, and of those after it, nothing more is known
    torch.testing.assert_close(answers.logits[same], logits[same], rtol=1e-4, atol=1e-4)


def same_codes(read: Mapping[str, tuple[Tensor, Tensor, Tensor]], answers: Answers, lengths: list[int]) -> Tensor:
    """Checks inputs and codes of every layer; returns for each token whether all codes of it and of those before it were torch's.

    A code may be off by one where the float value lies on a rounding boundary. What comes behind it is another computation.
    """
    assert set(read) == set(answers.probes)
    same = torch.ones(sum(lengths), dtype=torch.bool)
    for name, (x, codes, scale) in read.items():
        probe = answers.probes[name]
        assert probe.codes.dtype == torch.int8
        torch.testing.assert_close(probe.x[same], x[same], rtol=1e-4, atol=2e-4)
        steps, off = (x / scale).double(), probe.codes.int() - codes.int()
        on_boundary = (steps - steps.floor() - 0.5).abs() <= BOUNDARY
        wrong = (off != 0) & same[:, None]
        assert (on_boundary & (off.abs() == 1))[wrong].all(), name
        spoilt = wrong.any(dim=1).split(lengths)
        same &= ~torch.cat([one.cummax(dim=0).values for one in spoilt])
    return same


WEIGHTS = {
    "gpt2, int4": Shape(scheme="w4a16"),
    "llama, int4, tables": Shape("llama", "w4a16", tables=True),
    "gpt2, int8, tables": Shape(scheme="w8a16", tables=True),
    "llama, int8": Shape("llama", "w8a16"),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", seldom(WEIGHTS, ("gpt2, int4", "llama, int8")))
def test_integer_weights_give_torchs_logits(name: str, interpreted: Interpreted, tmp_path: Path) -> None:
    folder, given = decoders.checkpoint(tmp_path, WEIGHTS[name]), decoders.texts([7, 1, 12])
    answers: Answers = interpreted(decoders.in_kernels, folder, given)
    assert not answers.probes
    torch.testing.assert_close(answers.logits, decoders.in_torch(folder, given)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_neither_later_tokens_nor_neighbours_change_a_bit(family: str, interpreted: Interpreted, tmp_path: Path) -> None:
    config = {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
    folder = decoders.checkpoint(tmp_path, Shape(family, config=config))
    ways: Ways = interpreted(decoders.in_ways, folder, decoders.texts([LENGTH, 9]))
    assert torch.equal(ways.alone, ways.packed)
    assert torch.equal(ways.filled, ways.packed)
    assert torch.equal(ways.shorter, ways.packed[: len(ways.shorter)])
    assert torch.equal(ways.other_end[: len(ways.shorter)], ways.shorter)
    assert not torch.equal(ways.other_end[len(ways.shorter) :], ways.packed[len(ways.shorter) : len(ways.other_end)])


def test_in_float16_logits_stay_near(interpreted: Interpreted, tmp_path: Path) -> None:
    folder, given = decoders.checkpoint(tmp_path, Shape("llama", config={"num_hidden_layers": 1})), decoders.texts([6])
    logits, _ = decoders.in_torch(folder, given)
    found: Answers = interpreted(decoders.in_kernels, folder, given, torch.float16)
    assert found.logits.dtype == torch.float32
    assert (found.logits - logits).abs().max() < 0.1 * logits.abs().max()
