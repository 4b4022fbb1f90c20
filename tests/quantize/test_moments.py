"""Moments: the sums, what they say of an error, and the passes that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quantize import moments as module
from quantize.moments import Moments, in_groups, observe, output_errors


@given(st.integers(0, 2**31), st.integers(1, 6), st.lists(st.integers(0, 9), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_sums_do_not_depend_on_the_batches(seed: int, inputs: int, sizes: list[int]) -> None:
    x = torch.randn(sum(sizes), inputs, generator=torch.Generator().manual_seed(seed))
    found = Moments()
    for part in x.split(sizes):
        found.add(part)
    assert found.total == len(x)
    if len(x):
        torch.testing.assert_close(found.hessian_II, (x.double().T @ x.double() / len(x)).float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.mean_I, x.abs().mean(0), rtol=1e-4, atol=1e-5)
        assert found.hessian_II.dtype == torch.float32


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 6), st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_the_error_of_the_outputs_is_that_of_the_rows(seed: int, outputs: int, inputs: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, rounded = torch.randn(2, outputs, inputs, generator=generator)
    x, found = torch.randn(rows, inputs, generator=generator), Moments()
    found.add(x)
    expected = (x.double() @ (weight - rounded).double().T).square().mean(0)
    # what is added up may cancel: rounding errors are a share of the sum without signs
    most = (x.double().abs() @ (weight - rounded).double().abs().T).square().mean(0)
    error = (output_errors(weight, rounded, found.hessian_II) - expected).abs()
    assert bool((error <= 1e-5 * most).all()), (error, most)


def test_divided_moments_are_those_of_divided_rows() -> None:
    x, factor = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 2, 0.5, 10])
    plain, divided = Moments(), Moments()
    plain.add(x)
    divided.add(x / factor)
    torch.testing.assert_close(plain.divided(factor).hessian_II, divided.hessian_II)
    torch.testing.assert_close(plain.divided(factor).mean_I, divided.mean_I)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        Moments().add(torch.tensor([[1.0, bad]]))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.q(x) + self.k(x))
        return y


def send(model: nn.Module, features: Mapping[str, Tensor]) -> object:
    return model(features["x"])


def layers_of(net: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in net.named_children() if isinstance(layer, nn.Linear)}


def test_layers_are_grouped_by_what_fits() -> None:
    layers = {name: nn.Linear(size, 1) for name, size in (("a", 10), ("b", 10), ("c", 20), ("d", 10), ("e", 10))}
    units = [["a", "b"], ["c"], ["d"], ["e"]]
    assert in_groups(units, layers, 10**6) == [["a", "b", "c", "d", "e"]]
    assert in_groups(units, layers, 800) == [["a", "b"], ["c"], ["d", "e"]]
    assert in_groups(units, layers, 1) == [["a", "b"], ["c"], ["d"], ["e"]]


@pytest.mark.parametrize(("most_bytes", "passes"), [(10**6, 1), (64, 2)])
def test_a_pass_is_made_for_each_group(most_bytes: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", most_bytes)
    net, started = Net(), []
    x = torch.randn(7, 3, 4)

    def batches() -> Iterator[dict[str, Tensor]]:
        started.append(1)
        yield from ({"x": part} for part in x.split(2))

    found = {}
    for names, observed in observe(net, layers_of(net), [["q", "k"], ["out"]], batches, send):
        assert observed.of(names[0]).total == 21
        found |= {name: observed.of(name).hessian_II.clone() for name in names}
    assert (len(started), list(found)) == (passes, ["q", "k", "out"])
    rows = x.reshape(-1, 4)
    torch.testing.assert_close(found["q"], rows.T @ rows / 21)
    hidden = (net.q(rows) + net.k(rows)).detach()
    torch.testing.assert_close(found["out"], hidden.T @ hidden / 21)
