from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.models.architecture.structure import Structure
from foundation.training.kept_zeros import keep_zeros
from foundation.training.train import Batch
from prune.hook_points import HookPoints
from prune.least_squares import gram_matrices, surviving, update
from prune.surgery import KeptUnits, shrink

KEY = "stages.prune"


def problem(seed: int, outputs: int, inputs: int, tokens: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator), torch.randn(tokens, inputs, generator=generator)


@given(st.integers(0, 999), st.integers(1, 4), st.integers(2, 8), st.data())
def test_it_is_the_solution_of_the_regression(seed: int, outputs: int, inputs: int, data: st.DataObject) -> None:
    """Written out: least squares over the tokens, with rows of sqrt(lambda) that pull towards the old weights."""
    weight, x = problem(seed, outputs, inputs)
    kept = sorted(data.draw(st.sets(st.integers(0, inputs - 1), min_size=1, max_size=inputs - 1)))
    damping = 0.3
    some = x[:, kept].double()
    pull = (damping * some.square().sum(dim=0).mean()).sqrt()
    rows = torch.cat([some, pull * torch.eye(len(kept), dtype=torch.float64)])
    targets = torch.cat([x.double() @ weight.double().T, pull * weight[:, kept].double().T])
    expected = np.linalg.lstsq(rows.numpy(), targets.numpy(), rcond=None)[0].T
    found = surviving(weight, x.T.double() @ x.double(), torch.tensor(kept), damping)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3, atol=1e-4)


@given(st.integers(0, 999), st.integers(2, 8))
def test_the_error_is_no_larger_than_without(seed: int, inputs: int) -> None:
    weight, x = problem(seed, 3, inputs)
    kept = torch.arange(0, inputs, 2)
    y, plain = x @ weight.T, x[:, kept] @ weight[:, kept].T
    updated = x[:, kept] @ surviving(weight, x.T.double() @ x.double(), kept).T
    assert float((updated - y).square().sum()) <= float((plain - y).square().sum()) * (1 + 1e-6)


def test_an_input_that_the_others_say_as_well_is_no_loss() -> None:
    weight, x = problem(0, 3, 4)
    x[:, 3] = 2 * x[:, 0] - x[:, 1]
    kept = torch.tensor([0, 1, 2])
    updated = surviving(weight, x.T.double() @ x.double(), kept, damping=1e-9)
    torch.testing.assert_close(x[:, kept] @ updated.T, x @ weight.T, atol=1e-4, rtol=1e-4)


def test_a_constant_input_goes_into_the_bias() -> None:
    weight, x = problem(1, 3, 4)
    x[:, 2] = 5.0
    bias = torch.randn(3, generator=torch.Generator().manual_seed(2))
    augmented, inputs = torch.cat([weight, bias[:, None]], dim=1), torch.cat([x, torch.ones(40, 1)], dim=1)
    kept = torch.tensor([0, 1, 3, 4])
    updated = surviving(augmented, inputs.T.double() @ inputs.double(), kept, damping=1e-9, constant=True)
    torch.testing.assert_close(updated[:, -1], bias + 5 * weight[:, 2], atol=1e-3, rtol=1e-3)


@given(st.integers(0, 999), st.integers(1, 4), st.integers(3, 9), st.booleans())
def test_zeros_stay_and_the_rest_is_the_solution_of_each_output(seed: int, outputs: int, inputs: int, constant: bool) -> None:
    """Written out: a system of its own for each output, over the weights that may change."""
    weight, x = problem(seed, outputs, inputs)
    generator = torch.Generator().manual_seed(seed + 1)
    weight *= torch.rand(weight.shape, generator=generator) < 0.6
    x *= torch.randn(inputs, generator=generator).exp()
    kept = torch.arange(0, inputs - 1) if not constant else torch.arange(1, inputs)
    gone = [i for i in range(inputs) if i not in kept.tolist()]
    free = weight[:, kept] != 0
    gram = x.T.double() @ x.double()
    found = surviving(weight, gram, kept, 0.1, constant, free)
    matrix = gram[kept][:, kept].clone()
    damped = len(kept) - constant
    matrix[range(damped), range(damped)] += 0.1 * matrix.diagonal()[:damped].mean()
    for o in range(outputs):
        some = free[o].nonzero().flatten()
        expected = torch.zeros(len(kept), dtype=torch.float64)
        wanted = weight[o, gone].double() @ gram[gone][:, kept]
        expected[some] = weight[o, kept][some].double() + torch.linalg.solve(matrix[some][:, some], wanted[some])
        assert bool((found[o][~free[o]] == 0).all())
        torch.testing.assert_close(found[o].double(), expected, rtol=1e-4, atol=1e-5)


def test_the_update_of_a_model_keeps_its_zeros_where_it_has_to(make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    batches = [Batch(make_features("bert", rows=8, seed=seed), torch.zeros(8), np.arange(8), 0, 1) for seed in range(2)]
    lost = []
    for noted in (True, False):
        model = make_model("bert")
        structure = Structure.of(model, KEY)
        layer = model.get_submodule(HookPoints.of(model, structure).heads[1])
        layer.weight.data[:, ::3] = 0
        if noted:
            keep_zeros(model)
        update(model, structure, replace(KeptUnits.everything(structure.sizes), heads=[range(4), (0, 2), range(4)]), batches)
        lost.append(bool((layer.weight[:, [0, 3, 9]] != 0).any()))
    assert lost == [False, True]


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_model_comes_closer_to_what_it_was(kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model = make_model(kind)
    structure = Structure.of(model, KEY)
    batches = [Batch(make_features(kind, rows=8, seed=seed), torch.zeros(8), np.arange(8), 0, 1) for seed in range(6)]
    kept = replace(KeptUnits.everything(structure.sizes), heads=[(0, 2), (1, 2), (0, 1)], ffn=[range(0, 24, 2)] * 3)
    features = make_features(kind, rows=8, seed=99)
    with torch.inference_mode():
        expected = model(**features).logits
        plain = shrink(model, structure, kept, KEY)(**features).logits
    grams = gram_matrices(model, structure, [HookPoints.of(model, structure).heads[1]], batches)
    (gram,) = grams.values()
    bias = model.get_submodule(HookPoints.of(model, structure).heads[1]).bias is not None
    assert gram.shape == ((structure.attentions[1].size("query") + bias,) * 2)
    if bias:  # the last input is always 1: its square counts the tokens that are no padding
        assert gram[-1, -1] == sum(int(batch.features["attention_mask"].sum()) for batch in batches)
    update(model, structure, kept, batches)
    with torch.inference_mode():
        updated = shrink(model, structure, kept, KEY)(**features).logits
    assert float((updated - expected).square().mean()) < 0.8 * float((plain - expected).square().mean())


def test_without_a_cut_no_row_is_run(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    structure = Structure.of(model, KEY)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def rows() -> Any:
        raise AssertionError("nothing is asked of the model")
        yield

    update(model, structure, replace(KeptUnits.everything(structure.sizes), hidden=range(8), layers=(0, 2)), rows())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
