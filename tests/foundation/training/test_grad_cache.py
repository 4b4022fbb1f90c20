"""Micro-batches whose rows are compared with each other, against the batch in one piece."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from foundation.labels import text_groups, vectors
from foundation.labels.form import Labels
from foundation.machine.parallel import ALONE
from foundation.training.choices import PairLoss
from foundation.training.grad_cache import GradCache
from foundation.training.losses.table import losses_of
from foundation.training.processes.engine import Engine
from foundation.training.supervised import Supervised, supervised
from foundation.training.train import Batch
from tests.problems import raises_problem

WIDTH = 5


class Output:
    """As models of Transformers answer."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Body(nn.Module):
    """Vectors of rows `[b, 5]`, with dropout, a whole layer that is dropped by the CPU's generator, and a batch norm."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(WIDTH, 7), nn.Linear(7, 4), nn.Linear(7, 7)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(7) if norm else nn.Identity()
        self.graphs: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = 0

    def forward(self, x_bI: Tensor) -> Output:
        """Returns the vectors as logits; notes how many forward passes have a graph at this time."""
        hidden_b7 = self.dropout(torch.tanh(self.norm(self.first(x_bI))))
        if self.dropout.p and torch.rand([]) < 0.5:
            hidden_b7 = 2 * hidden_b7
        if hidden_b7.requires_grad:
            self.graphs.add(hidden_b7)
            self.most = max(self.most, len(self.graphs))
        return Output(self.second(hidden_b7))


def form_of(kind: str, groups: int = 2, seed: int = 0) -> Labels:
    """Labels of some groups of texts; some texts occur twice."""
    if kind == "scored":
        return vectors.labels_of(np.random.default_rng(seed).random(groups) * 0.5 + 0.5)
    size = {"pairs": 2, "triplets": 3}[kind]
    return text_groups.labels_of(
        [tuple(f"{number % 5 if part == 0 else number} {part}" for part in range(size)) for number in range(groups)]
    )


def labels_of(kind: str, groups: int, seed: int) -> tuple[Tensor, int]:
    """Labels of some groups of texts as tensors, and how many texts each has."""
    labels = form_of(kind, groups, seed)
    return torch.from_numpy(labels.array), len(labels) // groups


def batches_of(x_bI: Tensor, labels: Tensor, at_once: int) -> list[Batch]:
    """Micro-batches of so many rows."""
    rows = [np.arange(start, min(start + at_once, len(x_bI))) for start in range(0, len(x_bI), at_once)]
    return [Batch({"x_bI": x_bI[part]}, labels[part], part, 0, 1) for part in rows]


def of(model: nn.Module, objective: Any) -> tuple[GradCache, Engine]:
    cache = GradCache(objective, model, "tune")
    return cache, Engine(cache.answers, model, nn.ModuleList([model]), ALONE)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Takes the gradients of a model away from it."""
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def naive(vectors_nD: Tensor, labels: Tensor) -> Tensor:
    """The mean over pairs of -log softmax_q(20 cos(a_p, b_q))[p], of pairs without equal texts, one after the other."""
    unit = functional.normalize(vectors_nD, dim=1)
    logits = 20 * unit[0::2] @ unit[1::2].T
    return torch.stack([torch.logsumexp(row, 0) - row[place] for place, row in enumerate(logits)]).mean()


@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from(["pairs", "triplets", "scored"]),
    st.sampled_from(["ranking", "triplet"]),
    st.integers(0, 99),
)
def test_gradients_are_those_of_the_batch_in_one_piece(groups: int, at_once: int, kind: str, loss: PairLoss, seed: int) -> None:
    torch.manual_seed(seed)
    labels, size = labels_of(kind, groups, seed)
    x_bI, model, objective = torch.randn(len(labels), WIDTH), Body(), supervised("sentence-embedding", loss=loss, labels=form_of(kind))
    whole = objective(model, Batch({"x_bI": x_bI}, labels, np.arange(len(labels)), 0, 1))
    (whole[loss].sum() / len(labels)).backward()
    expected = gradients(model)
    cache, engine = of(model, objective)
    sums = cache.backward(engine, batches_of(x_bI, labels, size * at_once), len(labels), nullcontext)
    assert sums == {loss: pytest.approx(float(whole[loss].detach().sum()), rel=1e-5, abs=1e-6)}
    found = gradients(model)
    assert found.keys() == expected.keys() >= {"first.weight", "second.bias"}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("at_once", [2, 4, 6, 10])
def test_gradients_are_those_of_the_formula_of_all_pairs(at_once: int) -> None:
    torch.manual_seed(0)
    labels = torch.from_numpy(text_groups.labels_of([(f"a {number}", f"b {number}") for number in range(5)]).array)
    x_bI, model = torch.randn(10, WIDTH), Body()
    naive(model(x_bI).logits, labels).backward()
    expected = gradients(model)
    cache, engine = of(model, supervised("sentence-embedding", labels=form_of("pairs")))
    cache.backward(engine, batches_of(x_bI, labels, at_once), 10, nullcontext)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=5e-6)


def test_with_dropout_gradients_are_those_of_what_was_drawn_first() -> None:
    """Every micro-batch with its own draws, one graph over all of them: what the two runs of each have to come to."""
    labels, _ = labels_of("pairs", 8, 0)
    torch.manual_seed(0)
    x_bI, model, objective = torch.randn(16, WIDTH), Body(dropout=0.4), supervised("sentence-embedding", labels=form_of("pairs"))
    assert isinstance(objective, Supervised)
    parts = batches_of(x_bI, labels, 4)
    torch.manual_seed(7)
    together = torch.cat([model(**part.features).logits for part in parts])
    drawn_after = torch.rand(3)
    (objective.terms(together, torch.empty(0), Batch({}, labels, np.arange(16), 0, 1))["ranking"].sum() / 16).backward()
    expected = gradients(model)
    cache, engine = of(model, objective)
    torch.manual_seed(7)
    cache.backward(engine, parts, 16, nullcontext)
    assert torch.equal(torch.rand(3), drawn_after)  # the next step draws on where the first runs ended
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=5e-6)


def test_bfloat16_is_that_of_the_batch_in_one_piece() -> None:
    """Casts of weights that a run without a graph leaves behind would have no gradient."""
    labels, _ = labels_of("pairs", 8, 0)
    torch.manual_seed(0)
    x_bI, model, objective = torch.randn(16, WIDTH), Body(), supervised("sentence-embedding", labels=form_of("pairs"))
    with torch.autocast("cpu", torch.bfloat16):
        whole = objective(model, Batch({"x_bI": x_bI}, labels, np.arange(16), 0, 1))
    (whole["ranking"].sum() / 16).backward()
    expected = gradients(model)
    cache, engine = of(model, objective)
    cache.backward(engine, batches_of(x_bI, labels, 4), 16, lambda: torch.autocast("cpu", torch.bfloat16))
    found = gradients(model)
    assert found.keys() == expected.keys() >= {"first.weight", "second.weight"}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0.02, atol=0.02 * float(expected[name].abs().max()))


def test_one_micro_batch_has_a_graph_at_a_time() -> None:
    labels, _ = labels_of("pairs", 16, 0)
    model = Body()
    cache, engine = of(model, supervised("sentence-embedding", labels=form_of("pairs")))
    cache.backward(engine, batches_of(torch.randn(32, WIDTH), labels, 4), 32, nullcontext)
    assert model.most == 1


def test_the_last_micro_batch_runs_once_and_others_twice() -> None:
    labels, _ = labels_of("pairs", 9, 0)
    seen: list[tuple[int, bool]] = []
    model = Body()
    model.register_forward_pre_hook(lambda *_, **__: seen.append((0, torch.is_grad_enabled())))
    cache, engine = of(model, supervised("sentence-embedding", labels=form_of("pairs")))
    cache.backward(engine, batches_of(torch.randn(18, WIDTH), labels, 8), 18, nullcontext)
    assert [graph for _, graph in seen] == [False, False, True, True, True]


def test_running_means_move_once() -> None:
    labels, _ = labels_of("pairs", 8, 0)
    torch.manual_seed(0)
    model, x_bI = Body(norm=True), torch.randn(16, WIDTH)
    cache, engine = of(model, supervised("sentence-embedding", labels=form_of("pairs")))
    cache.backward(engine, batches_of(x_bI, labels, 4), 16, nullcontext)
    norm: Any = model.norm
    mean = torch.zeros(7)
    for part in x_bI.split(4):
        mean = 0.9 * mean + 0.1 * model.first(part).detach().mean(dim=0)
    torch.testing.assert_close(norm.running_mean, mean)
    assert int(norm.num_batches_tracked) == 4


def test_rows_that_do_not_count_change_nothing() -> None:
    labels, _ = labels_of("pairs", 4, 0)
    torch.manual_seed(0)
    model, x_bI = Body(), torch.randn(8, WIDTH)
    cache, engine = of(model, supervised("sentence-embedding", labels=form_of("pairs")))
    parts = batches_of(x_bI, labels, 4)
    sums = cache.backward(engine, parts, 8, nullcontext)
    expected = gradients(model)
    filler = Batch({"x_bI": torch.randn(2, WIDTH)}, labels[:2], np.arange(2), 0, 1, counts=False)
    assert cache.backward(engine, [*parts, filler], 8, nullcontext) == sums
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name])
    assert cache.backward(engine, [filler], 8, nullcontext) == {"ranking": 0.0}
    assert not any(gradient.any() for gradient in gradients(model).values())


def test_a_model_that_draws_from_elsewhere_is_refused_in_one_line() -> None:
    labels, _ = labels_of("pairs", 4, 0)
    model, elsewhere = Body(), np.random.default_rng(0)
    model.first.register_forward_hook(lambda module, given, output: output * float(elsewhere.random()))
    cache, engine = of(model, supervised("sentence-embedding", labels=form_of("pairs")))
    with raises_problem("tune.micro_batch_size", "given", "this Body"):
        cache.backward(engine, batches_of(torch.randn(8, WIDTH), labels, 4), 8, nullcontext)


@pytest.mark.parametrize(
    ("loss", "kind", "size", "cached"),
    [
        ("ranking", "pairs", 4, True),
        ("ranking", "triplets", 3, True),
        ("triplet", "pairs", 4, True),
        ("triplet", "triplets", 3, False),  # of one row each
        ("cosine", "scored", 2, False),
        ("ranking", "scored", 2, True),
        ("ranking", "pairs", None, False),
    ],
)
def test_only_losses_that_compare_rows_are_cached(loss: PairLoss, kind: str, size: int | None, cached: bool) -> None:
    losses = losses_of("sentence-embedding", loss, labels=form_of(kind, 4))
    found = GradCache.of(Supervised(losses, 0.0), Body(), size, "tune")
    assert (found is not None) == cached


def test_objectives_of_other_tasks_and_functions_are_not_cached() -> None:
    def objective(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        return {}

    given: tuple[Callable[..., Any], ...] = (objective, supervised("text-classification"), supervised("text-regression"))
    assert [GradCache.of(one, Body(), 2, "tune") for one in given] == [None, None, None]
