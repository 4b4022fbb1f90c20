"""Learned rotations: the simulation, its gradients, and what learning gains: python -m pytest tests/quantize/rotation/test_learned.py"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundation.models.forward import linears
from foundation.schemes.int8 import levels, on_grid, token_scale, weight_scale
from foundation.schemes.table import Scheme
from quantize.calibration import input_scale
from quantize.group_scales import Groups
from quantize.rotation.cayley import nearest_orthogonal
from quantize.rotation.learned import Learning, distance, learn, turn
from quantize.rotation.orthogonal import Rotation
from quantize.rotation.rotation import Rotations, rotate
from quantize.rotation.simulated import ORDER, Rounding, simulated, turned
from tests.problems import raises_problem
from tests.quantize.outliers import planted_stream
from tests.quantize.rotation.test_rotation import KEY, logits, made, relative

pytestmark = pytest.mark.whole
SCHEMES: list[tuple[Scheme, bool]] = [
    ("w8a8", True),
    ("w8a8-dynamic", True),
    ("w8a16", True),
    ("w4a16", False),
    ("w4a8-block", True),
    ("fp8", True),
]
NAMES = ["llama, tied", "llama with biases", "gpt2", "qwen2", "vit"]


def rounding_of(scheme: Scheme = "w8a8", *, symmetric: bool = True, size: int = 16) -> Rounding:
    return Rounding(scheme, 8, Groups(size, symmetric))


def rotated(name: str) -> tuple[Any, dict[str, Tensor], Rotations]:
    """Returns a rotated model with neutral norms, a row for it, and how it was rotated."""
    model, features = made(name)
    found: list[Rotations] = []
    rotate(model, features, 0, KEY, lambda model, rotations: found.append(rotations) or {})  # type: ignore[func-returns-value]
    return model, features, found[0]


def known(rotations: Rotations) -> dict[int, Rotation]:
    return {id(turn.rotation): turn.rotation for turns in rotations.turns.values() for turn in turns}


def nearby(rotations: Rotations, seed: int = 0, size: float = 0.3) -> dict[int, Tensor]:
    """Orthogonal matrices near the identity, which keep the vector of ones where norms subtract the mean."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for key, rotation in known(rotations).items():
        skew_DD = size * torch.randn(rotation.size, rotation.size, generator=generator, dtype=torch.float64) / rotation.size**0.5
        if rotations.stream.centred:
            skew_DD = skew_DD - skew_DD.mean(0) - skew_DD.mean(1, keepdim=True) + skew_DD.mean()
        found[key] = torch.matrix_exp(skew_DD - skew_DD.T)
    return found


def inner(model: nn.Module) -> list[str]:
    return [name for name in linears(model) if any(part.isdigit() for part in name.split("."))]


@pytest.mark.first(1)
@pytest.mark.parametrize("name", NAMES)
def test_unrounded_a_simulated_model_answers_as_before(name: str) -> None:
    model, features, rotations = rotated(name)
    expected = logits(model, features)
    matrices = {key: matrix_DD.float() for key, matrix_DD in nearby(rotations).items()}
    with torch.no_grad(), simulated(model, rotations.turns, matrices, {}) as turned_model:
        assert relative(turned_model(**features).logits, expected) < 1e-4
    assert torch.equal(logits(model, features), expected)


@pytest.mark.parametrize(("scheme", "symmetric"), SCHEMES)
@pytest.mark.parametrize("name", ["llama with biases", "gpt2"])
def test_a_simulated_model_is_the_turned_one_with_rounded_layers(name: str, scheme: Scheme, symmetric: bool) -> None:
    """Weights turned in place, each layer with its weight and, where the rotation reaches it, its input rounded beforehand."""
    model, features, rotations = rotated(name)
    matrices, rounding, chosen = nearby(rotations), rounding_of(scheme, symmetric=symmetric), inner(model)
    with torch.no_grad(), simulated(model, rotations.turns, _floats(matrices), dict.fromkeys(chosen, rounding)) as rounded:
        found = rounded(**features).logits
    turn(model, rotations, matrices)
    reached = {path for path in chosen if any(turn.axis == 1 for turn in rotations.turns.get(f"{path}.weight", ()))}
    assert 0 < len(reached) < len(chosen)
    float_answers = logits(model, features)
    for path in chosen:
        layer = model.get_submodule(path)
        with torch.no_grad():
            layer.weight.copy_(rounding.weight(layer.weight))
        if path in reached:
            layer.register_forward_pre_hook(lambda layer, inputs: (rounding.input(inputs[0], inputs[0]),))
    expected = logits(model, features)
    noise = (expected - float_answers).square().mean().sqrt()
    # a value at the border of two codes may round otherwise
    assert (found - expected).square().mean().sqrt() < 0.2 * noise
    assert noise > 0


def _floats(matrices: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {key: matrix_DD.float() for key, matrix_DD in matrices.items()}


def test_int8_is_rounded_to_its_grid() -> None:
    values = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    largest = levels(8)
    torch.testing.assert_close(rounding_of().weight(values), on_grid(values, weight_scale(values, largest), largest))
    scale = input_scale(float(values.abs().max()))
    torch.testing.assert_close(rounding_of().input(values, values), (values / scale).round() * scale)
    scale_N1 = token_scale(values)
    torch.testing.assert_close(rounding_of("w8a8-dynamic").input(values, values), (values / scale_N1).round() * scale_N1)
    assert rounding_of("w8a16").input(values, values) is values


def norm(part: Tensor) -> float:
    return float((part.double().abs() ** ORDER).sum()) ** (1 / ORDER)


@pytest.mark.parametrize(("scheme", "symmetric"), SCHEMES)
@pytest.mark.parametrize("what", ["weight", "input"])
def test_gradients_of_ranges(scheme: Scheme, symmetric: bool, what: str) -> None:
    """Against finite differences of x + m e, where x and e stay as they are: written out, range by range."""
    generator = torch.Generator().manual_seed(0)
    values, upstream = torch.randn(5, 37, generator=generator), torch.randn(5, 37, generator=generator)
    values[2] = 0.0  # a range of 0
    values[3, :16] = values[3, :16].abs() + 0.5  # no negative value
    rounding = rounding_of(scheme, symmetric=symmetric)
    free, alike = values.clone().requires_grad_(), values.clone().requires_grad_()
    rounded = rounding.weight(alike) if what == "weight" else rounding.input(free, alike)
    free_gradient, found = torch.autograd.grad((rounded * upstream).sum(), (free, alike), allow_unused=True)
    assert free_gradient is None if what == "weight" else torch.equal(free_gradient, upstream)
    if what == "input" and scheme in ("w8a16", "w4a16"):
        assert found is None
        return
    grouped = scheme in ("w4a8-block", "w4a16")
    pieces = (
        [(row, slice(start, start + 16)) for row in range(5) for start in (0, 16, 32)]
        if grouped
        else [(row, slice(0, 37)) for row in range(5)]
    )
    whole, error = what == "input" and scheme in ("w8a8", "fp8"), (rounded.detach() - values).double()

    def grown(x: Tensor, part: tuple[Any, ...]) -> float:
        before, now = values[part], x[part]
        if what == "weight" and not symmetric:  # each end grows by itself
            ends = [(before.clamp(min=0), now.clamp(min=0)), (before.clamp(max=0), now.clamp(max=0))]
            sizes = [float(old.abs().max()) for old, _ in ends]
            changes = [size * (norm(new) / norm(old) - 1) for size, (old, new) in zip(sizes, ends, strict=True) if size]
            return 1 + sum(changes) / sum(sizes) if sum(sizes) else 1.0
        return norm(now) / norm(before) if norm(before) else 1.0

    def surrogate(x: Tensor) -> float:
        return sum(float((upstream[part].double() * error[part]).sum()) * grown(x, (slice(None),) if whole else part) for part in pieces)

    for row, column in itertools.product((0, 1, 3), range(37)):
        moved = torch.zeros(5, 37, dtype=torch.float64)
        moved[row, column] = 1e-4
        slope = (surrogate(values.double() + moved) - surrogate(values.double() - moved)) / 2e-4
        assert float(found[row, column]) == pytest.approx(slope, rel=1e-2, abs=1e-4)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize(("name", "scheme"), [("llama, tied", "w4a8-block"), ("llama with biases", "w8a8"), ("gpt2", "w8a8-dynamic")])
def test_gradients_of_the_rotations(name: str, scheme: Scheme) -> None:
    """Along random directions, against finite differences of a model whose layers add the same noise, scaled by their ranges as they are
    turned; by hooks, without the modules that are tested."""
    model, features, rotations = rotated(name)
    matrices = _floats(nearby(rotations))
    chosen = inner(model)
    target = torch.randn(logits(model, features).shape, generator=torch.Generator().manual_seed(0))
    free = {key: matrix_DD.clone().requires_grad_() for key, matrix_DD in matrices.items()}
    with simulated(model, rotations.turns, free, dict.fromkeys(chosen, rounding_of(scheme))) as rounded:
        loss = (rounded(**features).logits * target).sum()
    gradients = dict(zip(free, torch.autograd.grad(loss, list(free.values())), strict=True))
    reference = copy.deepcopy(model)
    turn(reference, rotations, {key: matrix_DD.double() for key, matrix_DD in matrices.items()})
    noises: dict[str, Tensor] = {}
    rounding = rounding_of(scheme)

    def ratio(now: Tensor, before: Tensor, what: str) -> Tensor:
        """m after over m before, for each row, or for all."""
        if what == "input" and scheme == "w8a8":
            now, before = now.flatten(), before.flatten()
        size = 16 if scheme == "w4a8-block" else before.shape[-1]
        pieces = [(now[..., at : at + size], before[..., at : at + size]) for at in range(0, before.shape[-1], size)]
        return torch.cat(
            [((a**ORDER).sum(-1, keepdim=True) / (b**ORDER).sum(-1, keepdim=True)).pow(1 / ORDER).expand(a.shape) for a, b in pieces], -1
        )

    def loss_at(moved: Mapping[int, Tensor]) -> float:
        tried = copy.deepcopy(reference).double()
        for path in chosen:
            layer, turns = tried.get_submodule(path), rotations.turns.get(f"{path}.weight", ())
            still = reference.get_submodule(path).weight.detach()
            here = turned(model.get_submodule(path).weight.detach().double(), turns, {key: m.double() for key, m in moved.items()})
            noise = noises.setdefault(f"{path} weight", (rounding.weight(still) - still).double())
            layer.weight.data = still.double() + noise * ratio(here, still.double(), "weight")
            steps = [matrices[id(turn.rotation)].double().T @ moved[id(turn.rotation)].double() for turn in turns if turn.axis == 1]
            if steps:
                layer.register_forward_pre_hook(partial(noisy, path, steps))
        return float((tried(**features).logits * target.double()).sum())

    def noisy(path: str, steps: list[Tensor], layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs[0]
        first = noises.setdefault(f"{path} x", x.clone())
        noise = noises.setdefault(f"{path} input", rounding.input(x.float(), x.float()).double() - x)
        here = first
        for step_DD in steps:
            here = (here.reshape(-1, len(step_DD)) @ step_DD).reshape(here.shape)
        return (x + noise * ratio(here, first, "input").reshape(x.shape),)

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        loss_at(matrices)
        for key in matrices:
            direction_DD = torch.randn(matrices[key].shape, generator=generator)
            ahead, behind = (loss_at({**matrices, key: matrices[key] + sign * 1e-3 * direction_DD}) for sign in (1, -1))
            expected = float((gradients[key] * direction_DD).sum())
            assert (ahead - behind) / 2e-3 == pytest.approx(expected, rel=0.05, abs=0.02 * float(gradients[key].norm()))


def test_turning_a_weight_is_what_folding_does() -> None:
    _, _, rotations = rotated("gpt_neox")
    matrices = nearby(rotations)
    turns = [turn for turns in rotations.turns.values() for turn in turns if turn.indices is not None]
    assert turns
    for one in turns[:2]:
        assert one.indices is not None
        shape = [3, 3]
        shape[one.axis] = int(one.indices.max()) + 5
        values = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        rotation = Rotation(torch.ones(one.rotation.size, dtype=torch.float64), (matrices[id(one.rotation)],))
        expected = type(one)(one.axis, rotation, one.indices).of(values)
        torch.testing.assert_close(turned(values, (one,), matrices), expected)


def test_distances() -> None:
    found, expected = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    p, q = expected.softmax(dim=1), found.softmax(dim=1)
    assert float(distance(found, expected, by_kl=True)) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-4)
    assert float(distance(found, expected, by_kl=False)) == pytest.approx(float((found - expected).square().sum()), rel=1e-5)


def planted() -> tuple[Any, list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Returns a Llama with three channels that are far larger than the others, rows to learn by, and others."""
    model, _ = made("wide llama")
    planted_stream(model, channels=(1, 7, 20), factor=50.0)
    generator = torch.Generator().manual_seed(5)
    rows = [{"input_ids": torch.randint(64, (8, 32), generator=generator)} for _ in range(16)]
    return model, rows[:8], rows[8:]


def learned(model: nn.Module, rows: Sequence[dict[str, Tensor]], rounding: Rounding, steps: int, angle: float = 0.02) -> dict[str, Any]:
    """Rotates a model and turns it further, in place; returns the figures."""

    def further(model: nn.Module, rotations: Rotations) -> dict[str, object]:
        found = learn(model, rotations, rows, dict.fromkeys(inner(model), rounding), Learning(steps, angle, 0), lambda steps: steps)
        return found.turn(model, rotations)

    return rotate(model, rows[0], 0, KEY, further)


def loss_of(model: nn.Module, expected: Sequence[Tensor], rows: Sequence[dict[str, Tensor]], rounding: Rounding) -> float:
    """Returns the mean distance of a model with rounded layers; written without matrices, as the model is turned already."""
    small = copy.deepcopy(model)
    for path in inner(small):
        layer = small.get_submodule(path)
        with torch.no_grad():
            layer.weight.copy_(rounding.weight(layer.weight))
        if not path.endswith("down_proj"):
            layer.register_forward_pre_hook(lambda layer, inputs: (rounding.input(inputs[0], inputs[0]),))
    found = [logits(small, features) for features in rows]
    return sum(float(distance(one.flatten(0, 1), other.flatten(0, 1), by_kl=True)) for one, other in zip(found, expected, strict=True))


@pytest.mark.first(1)
@pytest.mark.parametrize(("scheme", "most"), [("w8a8", 0.9), ("w4a8-block", 1.0)])  # 0.62 and 0.88 to 0.97, by the processor's rounding
def test_learning_gains_more_than_hadamard_matrices_on_other_rows(scheme: Scheme, most: float) -> None:
    model, rows, others = planted()
    rounding = rounding_of(scheme, size=64)
    expected = [logits(model, features) for features in others]
    plain = loss_of(model, expected, others, rounding)
    hadamard, turned_further = copy.deepcopy(model), copy.deepcopy(model)
    rotate(hadamard, rows[0], 0, KEY)
    figures = learned(turned_further, rows, rounding, steps=40)
    before, after = (loss_of(one, expected, others, rounding) for one in (hadamard, turned_further))
    assert figures["loss"] < figures["loss_before"]
    assert figures["kept"] > 0
    assert figures["difference"] < 1e-4
    assert after < most * before
    assert before < plain or scheme != "w8a8"  # blocks keep large channels to themselves


@pytest.mark.slow
def test_learning_repeats_and_never_ends_worse() -> None:
    model, rows, _ = planted()
    figures, weights = [], []
    for angle in (0.02, 0.02, 3.0):
        tried = copy.deepcopy(model)
        figures.append(learned(tried, rows, rounding_of(), steps=2, angle=angle))
        weights.append(tried.state_dict())
    assert figures[0] == figures[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    rotate(model, rows[0], 0, KEY)
    assert figures[2]["kept"] == 0
    assert figures[2]["loss"] == figures[2]["loss_before"]
    assert all(torch.equal(weights[2][name], value) for name, value in model.state_dict().items())


def test_matrices_are_orthogonal_before_they_are_folded() -> None:
    model, features, rotations = rotated("llama")
    expected = logits(model, features)
    matrices = {key: matrix_DD + 1e-3 * torch.randn_like(matrix_DD) for key, matrix_DD in nearby(rotations).items()}
    turn(model, rotations, matrices)
    assert relative(logits(model, features), expected) < 1e-4
    for matrix_DD in matrices.values():
        nearest = nearest_orthogonal(matrix_DD).float()
        assert float((nearest.T @ nearest - torch.eye(len(nearest))).abs().max()) < 1e-5


def test_a_model_without_finite_answers_is_refused() -> None:
    model, features, rotations = rotated("llama")
    model.lm_head.weight.data[0, 0] = torch.nan
    with raises_problem("model", "NaN or infinite"):
        learn(model, rotations, [features], {}, Learning(1, 0.1, 0), lambda steps: steps)


def test_rows_of_padding_do_not_count() -> None:
    model, _, rotations = rotated("llama")
    ids = torch.arange(1, 13).view(2, 6)
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    losses = []
    for filler in (1, 9):
        padded = torch.where(mask == 1, ids, filler)
        batches = [{"input_ids": padded, "attention_mask": mask}]
        roundings = dict.fromkeys(inner(model), rounding_of("w8a8-dynamic"))
        figures = learn(copy.deepcopy(model), rotations, batches, roundings, Learning(1, 1e-9, 0), lambda steps: steps).figures
        losses.append(figures["loss_before"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
