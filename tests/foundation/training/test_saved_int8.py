"""Activations saved in 8 bits: against a naive layer that rounds its own input, by error bounds, and by what has to stay exact."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig

from compress.devices.activations import Alive, Step, phases_of_backward
from foundation.labels.tasks import TASKS
from foundation.models.architecture.shapes import auto_class
from foundation.models.library import quiet, with_class
from foundation.models.size import inputs_of
from foundation.training import saved_int8
from foundation.training.recompute import recomputed
from foundation.training.saved_int8 import LEVELS, Packed, packed, saved_in_int8
from tests.architectures.table import ARCHITECTURES, LENGTH, VOCABULARY
from tests.seldom import seldom

WIDTH, ROWS = 64, 96
USUAL = ("bert", "vit", "llama", "t5")


@given(
    st.lists(st.integers(1, 5), max_size=2), st.sampled_from([1, 31, 32, 96, 100, 257, 512]), st.floats(1e-30, 1e30), st.integers(0, 2**31)
)
@settings(max_examples=60, deadline=None)
def test_every_number_comes_back_within_half_a_step_of_its_group(axes: list[int], size: int, scale: float, seed: int) -> None:
    x = scale * torch.randn(*axes, size, generator=torch.Generator().manual_seed(seed))
    found = packed(x)
    assert (found.tensor().shape, found.tensor().dtype, found.codes.dtype) == (x.shape, x.dtype, torch.int8)
    group = found.codes.shape[1]
    assert size % group == 0
    step = x.reshape(-1, group).abs().amax(dim=1, keepdim=True) / LEVELS
    assert bool(((found.tensor() - x).reshape(-1, group).abs() <= step * 0.5001 + 1e-37).all())


@pytest.mark.parametrize("x", [torch.zeros(3, 64), torch.full((2, 64), -2.5), torch.eye(64), torch.full((1, 32), 1e-42)])
def test_groups_of_zeros_and_of_one_value(x: Tensor) -> None:
    assert torch.allclose(packed(x).tensor(), x, atol=1e-37)


def test_halves_come_back_as_halves() -> None:
    x = torch.randn(8, 64).bfloat16()
    assert packed(x).tensor().dtype == torch.bfloat16


class _Naive(torch.autograd.Function):
    """A linear layer that rounds its input for the gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        groups = x.reshape(-1, WIDTH)
        scale = groups.abs().max(dim=1, keepdim=True).values / 127
        ctx.save_for_backward(((groups / scale).round() * scale).reshape(x.shape), weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rounded, weight = ctx.saved_tensors
        (gradient,) = gradients
        flat = gradient.reshape(-1, gradient.shape[-1])
        return gradient @ weight, flat.T @ rounded.reshape(-1, WIDTH), flat.sum(dim=0)


class _Three(nn.Module):
    """Three layers that read one input, changed in place in between, and a fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, apply: Callable[[nn.Linear, Tensor], Tensor] | None = None) -> Tensor:
        run = apply or (lambda layer, given: layer(given))
        first, second, third, last = self.layers
        y = torch.sin(x)
        total = run(first, y) + run(second, y) * run(third, y)  # type: ignore[arg-type]
        return run(last, torch.cos(total))  # type: ignore[arg-type]


def gradients_of(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*model.parameters()]))


@pytest.mark.parametrize("rows", [(ROWS,), (4, 24), (WIDTH + 1,)])
def test_gradients_are_those_of_layers_that_round_their_own_input(rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = _Three().double(), torch.randn(*rows, WIDTH).double()
    weights = torch.randn(*rows, WIDTH).double()
    expected = gradients_of(model, (model(x, lambda layer, y: _Naive.apply(y, layer.weight, layer.bias)) * weights).sum())  # type: ignore[no-untyped-call]
    exact = gradients_of(model, (model(x) * weights).sum())
    with saved_in_int8(model):
        loss = (model(x) * weights).sum()
        found = gradients_of(model, loss)
    assert torch.equal(loss, (model(x) * weights).sum())
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)  # scales have 24 bits
    assert any(not torch.allclose(mine, other, rtol=1e-5, atol=1e-5) for mine, other in zip(found, exact, strict=True))


def count_packed(monkeypatch: pytest.MonkeyPatch) -> list[Packed]:
    made: list[Packed] = []
    monkeypatch.setattr(saved_int8, "packed", lambda tensor: made.append(packed(tensor)) or made[-1])
    return made


def test_an_input_of_several_layers_is_packed_once_and_a_changed_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, model = count_packed(monkeypatch), _Three()
    with saved_in_int8(model):
        model(torch.randn(ROWS, WIDTH))
        assert len(made) == 2
        made.clear()
        x = torch.randn(ROWS, WIDTH)
        model.layers[0](x)
        model.layers[0](x.mul_(2))
        assert len(made) == 2


def test_memory_that_is_used_again_is_not_taken_for_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    with saved_in_int8(model):
        for seed in range(50):
            inputs = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed + number)) for number in range(2)]
            losses = []
            for x in inputs:
                y = x + 0.0  # freed after the product: the next one gets its memory
                losses.append(model(y).sum())
                del y
            (found,) = torch.autograd.grad(losses[0] + 2 * losses[1], [model.weight])
            expected = (packed(inputs[0]).tensor() + 2 * packed(inputs[1]).tensor()).sum(dim=0).expand(WIDTH, WIDTH)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_nothing_is_kept_once_backward_has_used_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Three()
    with saved_in_int8(model):
        loss = model(torch.randn(ROWS, WIDTH)).sum()
        loss.backward()
    del loss
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, Packed)]


def test_gradients_of_inputs_and_hooks_on_them_are_exact() -> None:
    """Weights are not rounded, so that nothing adds up on the way down."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    seen: list[Tensor] = []
    handles = [model[1].register_full_backward_hook(lambda module, inward, outward: seen.append(inward[0]))]
    handles.append(model[2].weight.register_hook(lambda gradient: seen.append(gradient)))
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    model(x).square().sum().backward()
    exact = [one.clone() for one in seen]
    seen.clear()
    with saved_in_int8(model):
        (found,) = torch.autograd.grad(model(x).square().sum(), x)
        model(x).square().sum().backward()
    assert torch.equal(found, expected)
    assert len(seen) == len(exact) == 3
    for mine, other in zip(seen, exact, strict=True):
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05 * float(other.abs().max()))
    assert all(handle.remove() is None for handle in handles)


def test_a_small_value_above_0_keeps_its_gradient_behind_relu() -> None:
    x = (torch.rand(ROWS, WIDTH) * 1e-3 + (torch.rand(ROWS, WIDTH) > 0.9)).requires_grad_()
    model = nn.Sequential(nn.ReLU())
    with saved_in_int8(model):
        (found,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(found, torch.ones_like(x))


class _Layer(nn.Module):
    """A decoder layer whose feed-forward network is not a module of its own, as in OPT and BART."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"query": nn.Linear(WIDTH, WIDTH, bias=False)})
        self.fc1, self.act = nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        query = self.attention["query"](x).view(2, -1, 2, WIDTH // 2).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(query, query, query)


def test_attention_in_a_layer_with_an_activation_function_stays_exact() -> None:
    model, x = _Layer(), torch.randn(ROWS, WIDTH, requires_grad=True)
    (exact,) = torch.autograd.grad(model(x).square().sum(), x)
    with saved_in_int8(model):
        (found,) = torch.autograd.grad(model(x).square().sum(), x)
    assert torch.equal(found, exact)


def test_attention_stays_exact() -> None:
    """At scores of several hundreds queries, keys or logarithms of sums in 8 bits would be off by more than 1."""
    torch.manual_seed(0)
    given = [(10 * torch.randn(2, 4, 128, 32)).requires_grad_() for _ in range(3)]

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(nn.functional.scaled_dot_product_attention(*given).square().sum(), given)

    exact = gradients()
    with saved_in_int8(nn.Identity()):
        assert all(torch.equal(mine, other) for mine, other in zip(gradients(), exact, strict=True))


@pytest.mark.parametrize("name", seldom(ARCHITECTURES, ARCHITECTURES.keys() - set(USUAL)))
def test_models_train_with_gradients_close_to_the_exact_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_int8, "LEAST_NUMBERS", 32)
    monkeypatch.setattr(saved_int8, "LEAST_AXIS", 8)
    architecture = ARCHITECTURES[name]
    keys, task = dict(architecture.config), architecture.task
    if TASKS[task].modality == "text":
        keys |= {"vocab_size": VOCABULARY, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    with quiet():
        model: Any = auto_class(task, config).from_config(with_class(copy.deepcopy(config), task)).train()
    rows = {key: value.repeat(2, *[1] * (value.ndim - 1)) for key, value in inputs_of(config, task, LENGTH).items()}
    rows = {key: torch.randn_like(value) if value.is_floating_point() else value for key, value in rows.items()}

    def step(kind: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        with recomputed(model, kind, "x"):
            logits = model(**rows).logits.float()
            (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        return logits.detach(), torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])

    before = {key: value.clone() for key, value in model.state_dict().items()}
    logits, exact = step("none")
    model.load_state_dict(before)
    mine, found = step("int8")
    assert torch.equal(mine, logits)
    assert name not in USUAL or not torch.equal(found, exact)  # some begin with weights of 0, or have convolutions alone
    assert float((found - exact).norm() / exact.norm()) < 0.1
    assert "forward" not in {attribute for module in model.modules() for attribute in vars(module)}


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_less_than_half_of_the_bytes_of_float32_is_saved(kind: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    config, task = AutoConfig.for_model(kind, **sizes, pad_token_id=0), "text-classification"
    with quiet():
        model: Any = auto_class(task, config).from_config(config).eval()  # without dropout, whose masks both save
    rows = {name: value.repeat(4, 1) for name, value in inputs_of(config, task, 128).items()}
    rows["input_ids"] = torch.randint(4, 64, (4, 128))
    known = (*model.parameters(), *model.buffers(), *rows.values())

    def saved(how: Any) -> int:
        with recomputed(model, how, "x"), Alive(known, [*model.parameters()]) as alive:
            loss = model(**rows).logits.float().sum()
            kept = alive.now
            del loss
        return kept

    assert saved("int8") < 0.5 * saved("none")


@pytest.mark.first(1)
@pytest.mark.parametrize("half", [False, True])
def test_a_plan_counts_fewer_bytes(half: bool) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    config = AutoConfig.for_model("bert", **sizes, pad_token_id=0)

    def saved(kind: Any) -> int:  # after the first gradient: before it, what is packed has copies in float32 for a moment
        return phases_of_backward(Step(config, "text-classification", 8, 128, half=half, checkpointing=kind))[1].saved

    assert saved("int8") < (0.9 if half else 0.7) * saved("none")
