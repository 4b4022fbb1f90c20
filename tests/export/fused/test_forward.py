"""The whole encoder on its kernels: the codes of every layer are torch's, and packed rows have the bits of padded ones."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from export.parity.parity import BOUNDARY
from foundation.models.checkpoint import load
from tests.export.fused import encoders
from tests.export.fused.encoders import Answers, Shape, Ways
from tests.seldom import seldom

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]
RAGGED = {"heads": [(0, 1, 3), (2,)], "ffn": [range(0, 96, 3), range(37)]}
SHAPES = {
    "bert": Shape(),
    "ragged, in blocks": Shape(kept=RAGGED, sparsity=0.6, config={"num_attention_heads": 4}),
    "ragged": Shape(kept=RAGGED, config={"num_attention_heads": 4}),
    "in blocks": Shape(sparsity=0.6),
    "mixed": Shape(
        floats=("0.output.dense", "1.attention.self.value"), smooth=("0.attention.output.dense", "1.output.dense"),
        uneven=("0.attention.self.key", "1.intermediate.dense"),
    ),
    "head of silu": Shape(family="distilbert", config={"activation": "silu"}),
    "int8 head": Shape(head=True),
    "roberta": Shape(family="roberta"),
    "electra": Shape(family="electra"),
    "mpnet": Shape(family="mpnet"),
    "all float but one": Shape(floats=("query", "key", "value", "attention.output.dense", "intermediate.dense")),
    "first and last float": Shape(floats=("query", "1.output.dense")),
}  # fmt: skip
RARE = ("int8 head", "ragged", "in blocks", "roberta", "electra", "all float but one", "first and last float", "head of silu")


@pytest.mark.first(1)
@pytest.mark.parametrize("name", seldom(SHAPES, RARE))
def test_the_codes_of_every_layer_are_torchs(name: str, interpreted: Interpreted, tmp_path: Path) -> None:
    shape = SHAPES[name]
    given = encoders.features(3, kinds=shape.family in ("bert", "electra"))
    folder = encoders.checkpoint(tmp_path, shape)
    logits, read = encoders.in_torch(folder, given)
    answers: Answers = interpreted(encoders.in_kernels, folder, given)
    lengths = given["attention_mask"].sum(axis=1).tolist()
    same = compare_codes(read, answers, lengths)
    assert sum(same) >= len(lengths) - 1
    torch.testing.assert_close(answers.logits[same], logits[same], rtol=1e-4, atol=1e-4)


def compare_codes(read: Mapping[str, tuple[Tensor, Tensor, Tensor]], answers: Answers, lengths: list[int]) -> list[bool]:
    """Checks inputs and codes of every layer; returns for each sequence whether all its codes were torch's.

    A code may be off by one where the float value lies on a rounding boundary. What comes behind it in its sequence is another computation.
    """
    assert set(read) == set(answers.probes)
    tokens = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    same = torch.ones(len(lengths), dtype=torch.bool)
    for name, (x, codes, scale) in read.items():
        probe, of_token = answers.probes[name], tokens if len(x) == len(tokens) else torch.arange(len(lengths))
        looked_at = same[of_token]
        assert probe.codes.dtype == torch.int8
        torch.testing.assert_close(probe.x[looked_at], x[looked_at], rtol=1e-4, atol=2e-4)
        steps, off = (x / scale).double(), probe.codes.int() - codes.int()
        on_boundary = (steps - steps.floor() - 0.5).abs() <= BOUNDARY
        wrong = (off != 0) & looked_at[:, None]
        assert (on_boundary & (off.abs() == 1))[wrong].all(), name
        same[of_token[wrong.any(dim=1)]] = False
    return same.tolist()


@pytest.mark.slow
def test_a_row_has_the_same_bits_whatever_is_packed_beside_it(interpreted: Interpreted, tmp_path: Path) -> None:
    """In one block, through which rows go eight times: every block is computed by the same kernels."""
    folder = encoders.checkpoint(tmp_path, Shape(config={"num_hidden_layers": 1}))
    ways: Ways = interpreted(encoders.in_ways, folder, encoders.features(2))
    for found in (ways.padded, ways.filled):
        assert torch.equal(found, ways.packed)
    assert torch.equal(ways.alone, ways.packed[:2])
    assert torch.equal(ways.padded_logits, ways.logits)
    assert torch.equal(ways.recorded_logits, ways.logits)


@pytest.mark.slow
def test_in_float16_every_layer_quantizes_and_multiplies_what_it_reads(interpreted: Interpreted, tmp_path: Path) -> None:
    """Layer by layer on its own inputs: what float16 rounds grows from layer to layer, so that later codes are not those of torch."""
    folder, given = encoders.checkpoint(tmp_path), encoders.features(3)
    _, read = encoders.in_torch(folder, given)
    found: Answers = interpreted(encoders.in_kernels, folder, given, torch.float16)
    model = load(folder)
    assert found.logits.dtype == torch.float32
    for name, probe in found.probes.items():
        layer, scale = model.get_submodule(name), read[name][2]
        steps = (probe.x / scale).double()
        off = (probe.codes.double() - steps.clamp(-128, 127)).abs()
        assert (off <= 0.5 + 2.0**-10 * steps.abs() + 1e-3).all(), name
        sums = probe.codes.double() @ layer.weight.double().T
        assert torch.equal(probe.y, sums.float() * (scale * layer.weight_scale)), name
    first = "bert.encoder.layer.0.attention.self.query"
    off = (found.probes[first].codes.int() - read[first][1].int()).abs()
    assert off.max() <= 1
    assert (off > 0).double().mean() < 0.02


def test_blocks_of_zeros_are_not_stored(interpreted: Interpreted, tmp_path: Path) -> None:
    folder = encoders.checkpoint(tmp_path, SHAPES["in blocks"])
    sizes = interpreted(encoders.sizes_of_weights, folder)
    assert {kind for kind, _, _ in sizes.values()} == {"SparseWeight"}
    assert all(stored < 0.6 * dense for _, stored, dense in sizes.values())
