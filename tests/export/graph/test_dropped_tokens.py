"""Tokens are selected as early as can be: against the graph as it was traced, on models and on graphs drawn at random."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.graph.dropped_tokens import select_early
from export.graph.onnx import export_float
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from prune.tokens.tokens import with_tokens
from tests.export import tiny_checkpoints as tiny
from tests.export.graph.test_unread_tokens import STEPS, WIDTH, Program, answers, check, layer

KEPT = 3


def select(program: Program, x: str, scores_of: str) -> str:
    """Selects the tokens with the largest first number, as the exporter writes it: pairs of row and token."""
    column = program.add("Gather", [scores_of, program.constant(np.array(0))], ["batch", "sequence"], axis=2)
    program.nodes.append(
        onnx.helper.make_node("TopK", [column, program.constant(np.array([KEPT]))], [f"{x}.best", f"{x}.tokens"], f"{x}.topk", axis=1)
    )
    program.shapes |= {f"{x}.best": ["batch", KEPT], f"{x}.tokens": ["batch", KEPT]}
    program.integers |= {f"{x}.tokens"}
    token = program.whole("Unsqueeze", [f"{x}.tokens", program.constant(np.array([-1]))], ["batch", KEPT, 1])
    zero = program.whole("Mul", [token, program.constant(np.array(0))], ["batch", KEPT, 1])
    batch = program.whole("Shape", ["x"], [1], start=0, end=1)
    scalar = program.whole("Squeeze", [batch], [])
    numbers = program.whole("Range", [program.constant(np.array(0)), scalar, program.constant(np.array(1))], ["batch"])
    column = program.whole("Unsqueeze", [numbers, program.constant(np.array([1, 2]))], ["batch", 1, 1])
    row = program.whole("Add", [zero, column], ["batch", KEPT, 1])
    pairs = program.whole("Concat", [row, token], ["batch", KEPT, 2], axis=2)
    return program.add("GatherND", [x, pairs], ["batch", KEPT, WIDTH])


@pytest.mark.whole
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), max_size=8), st.integers(0, 9), st.booleans(), st.integers(0, 99))
def test_random_graphs_answer_as_before(steps, scored, also_in_full, seed):
    program = Program(seed)
    made = program.steps("x", steps)
    x = select(program, made[-1], made[scored % len(made)])
    program.read(x, 0)
    program.outputs.append(program.add("Tanh", [x], program.shapes[x]))
    if also_in_full:
        program.outputs.append(made[seed % len(made)] if made[seed % len(made)] != "x" else program.linear("x"))
    check(program.model(), KEPT, select_early)


def test_what_follows_the_choice_is_computed_for_what_stays():
    """The tokens are chosen by the input of the layer: its products but those of keys and values have fewer rows."""
    program = Program()
    program.read(select(program, layer(program, "x", bias=False), "x"), 0)
    assert check(program.model(), KEPT, select_early) == 6


def test_a_bias_for_all_rows_is_read_in_full():
    """Of [1, S, S] no tokens of a row can be taken: scores are computed in full, and what reads their softmax is not."""
    program = Program()
    program.read(select(program, layer(program, "x"), "x"), 0)
    assert check(program.model(), KEPT, select_early) == 4


def test_what_the_choice_needs_is_computed_in_full():
    """The tokens are chosen by the output of the layer, which is computed before."""
    program = Program()
    x = layer(program, "x", bias=False)
    program.read(select(program, x, x), 0)
    assert check(program.model(), KEPT, select_early) == 0


def test_two_selections_follow_each_other():
    program = Program()
    x = select(program, layer(program, "x", bias=False), "x")
    y = program.add("Add", [x, program.linear(program.linear(x))], program.shapes[x])
    program.read(select(program, y, x), 0)
    assert check(program.model(), KEPT, select_early) == 6 + 2


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        pytest.param(family, layers, marks=pytest.mark.slow)  # tests/prune/tokens/test_tokens.py: a BERT of two layers, as a run exports it
        for family, layers in (("bert", 2), ("vit", 3), ("bert", 3), ("distilbert", 3), ("roberta", 3), ("deit", 3))
    ],
)
def test_models_answer_as_torch(family: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Padding is dropped where there is a mask, and twice where there are three layers; the exporter takes long for both together."""
    config = tiny.CONFIGS[family]()
    config.num_hidden_layers = layers
    monkeypatch.setitem(tiny.CONFIGS, family, lambda: config)
    folder = tmp_path / "plain"
    prepared = tiny.write(folder, family)
    weights = [torch.randn(16, generator=torch.Generator().manual_seed(seed)) for seed in range(layers)]
    last = 0.3 if family in tiny.IMAGES else 0.1  # of an image with few tokens one alone would stay, and nothing would be chosen
    model = with_tokens(load(folder), (0.5, last, last)[:layers], weights, "key")
    (tmp_path / "tokens").mkdir()
    save(model, folder, tmp_path / "tokens", "test")
    exported = export_float(Checkpoint(tmp_path / "tokens"), prepared, tmp_path / "model.onnx")
    graph = onnx.load(exported)
    assert sum(node.op_type == "TopK" for node in graph.graph.node) == layers - 1
    for batch, length in ((1, 2), (3, 7), (2, tiny.LENGTH)):
        features = tiny.features(family, batch, length)
        with torch.no_grad():
            expected = model(**{name: torch.from_numpy(value) for name, value in features.items()}).logits
        np.testing.assert_allclose(answers(graph, features)[0], expected, rtol=1e-4, atol=1e-4)
