"""Collectives over tokens against sums and slices that are written out, for lengths that processes divide and others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from foundation.models.layers.token_shares import Group, Reading, all_tokens, own_tokens, read, reduced
from tests.threads import together

LENGTHS = [(2, 8), (2, 7), (3, 7), (3, 1), (4, 5)]


def parts_of(whole_bLD: Tensor, processes: int) -> list[Tensor]:
    """The tokens of each process, in a loop over tokens."""
    rows, length, width = whole_bLD.shape
    share = -(-length // processes)
    parts = torch.zeros(processes, rows, share, width, dtype=whole_bLD.dtype)
    for token in range(length):
        parts[token // share, :, token % share] = whole_bLD[:, token]
    return list(parts)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 3))
def test_shares_are_all_tokens_in_order_and_zeros_behind_them(processes: int, length: int, rows: int) -> None:
    whole_bLD = torch.randn(rows, length, 2)
    parts = [Group(processes, rank).own(whole_bLD) for rank in range(processes)]
    assert all(map(torch.equal, parts, parts_of(whole_bLD, processes)))
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)  # the whole is not kept with its share
    assert torch.equal(torch.cat(parts, dim=1)[:, :length], whole_bLD)


@pytest.mark.parametrize(("processes", "length"), LENGTHS)
def test_collectives_and_their_gradients_by_hand(processes: int, length: int) -> None:
    torch.manual_seed(0)
    wholes = [torch.randn(2, length, 3, dtype=torch.float64) for _ in range(processes)]  # what each has for all tokens
    owns = parts_of(wholes[0], processes)
    upstream = [torch.randn_like(own) for own in owns]
    upstream_whole = torch.randn_like(wholes[0])

    def run(rank: int) -> dict[str, Tensor]:
        import torch.distributed as dist

        group, found = Group(processes, rank, dist.group.WORLD), dict[str, Tensor]()
        part = wholes[rank].clone().requires_grad_()
        found["reduced"] = reduced(part, group)
        found["reduced gradient"] = torch.autograd.grad(found["reduced"], part, upstream[rank])[0]
        found["own"] = own_tokens(part, group)
        found["own gradient"] = torch.autograd.grad(found["own"], part, upstream[rank])[0]
        own = owns[rank].clone().requires_grad_()
        found["all"] = all_tokens(own, group, length)
        found["all gradient"] = torch.autograd.grad(found["all"], own, upstream_whole)[0]
        reading = Reading(group, own, length)
        found["gathered"] = reading.whole_bLD
        found["gathered gradient"] = torch.autograd.grad(reading.whole_bLD, own, wholes[rank])[0]
        a, b, unused = (torch.ones(size, dtype=torch.float64, requires_grad=True) for size in (3, 2, 1))
        x, y, _ = read([a, b, unused], group)
        found["read"], found["read too"] = torch.autograd.grad([x, y], [a, b], [part.detach()[0, 0], part.detach()[0, 0, :2]])
        (torch.autograd.grad(read([a, unused], group)[0].sum(), [a, unused], allow_unused=True)[1] is None) or pytest.fail(
            "given a gradient"
        )
        return {name: value.detach() for name, value in found.items()}

    sums, joined = parts_of(sum(wholes), processes), torch.cat(upstream, dim=1)[:, :length]  # type: ignore[arg-type]
    for rank, found in enumerate(together(processes, run)):
        torch.testing.assert_close(found["reduced"], sums[rank])
        assert torch.equal(found["reduced gradient"], joined)
        assert torch.equal(found["own"], parts_of(wholes[rank], processes)[rank])
        assert torch.equal(found["own gradient"], joined)
        assert torch.equal(found["all"], wholes[0])
        assert torch.equal(found["all gradient"], parts_of(upstream_whole, processes)[rank])
        assert torch.equal(found["gathered"], wholes[0])
        torch.testing.assert_close(found["gathered gradient"], sums[rank])
        torch.testing.assert_close(found["read"], sum(whole[0, 0] for whole in wholes))
        torch.testing.assert_close(found["read too"], sum(whole[0, 0, :2] for whole in wholes))


@pytest.mark.parametrize(("processes", "length"), LENGTHS)
def test_products_have_the_gradients_of_whole_layers_and_keep_own_tokens_alone(processes: int, length: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
    layers = [[torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)] for _ in range(processes)]
    for weight, bias in layers:
        weight.requires_grad_()
        bias.requires_grad_()
    upstream = torch.randn(processes, 2, length, 4, dtype=torch.float64)
    expected = [functional.linear(x, weight, bias) for weight, bias in layers]
    torch.autograd.backward(expected + expected, [*upstream, *upstream])  # two layers beside each other

    def run(rank: int) -> tuple[Any, ...]:
        import torch.distributed as dist

        own = parts_of(x.detach(), processes)[rank].requires_grad_()
        weight, bias = (each.detach().clone().requires_grad_() for each in layers[rank])
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.numel()) or each, lambda each: each):
            reading = Reading(Group(processes, rank, dist.group.WORLD), own, length)
            first, second = reading.product(weight, bias), reading.product(weight, bias)
        reading.close()
        torch.autograd.backward([first, second], [upstream[rank], upstream[rank]])
        assert kept == 2 * [own.numel(), weight.numel()]
        assert reading.again_bLD is None  # freed as soon as all layers are through
        return first, second, own.grad, weight.grad, bias.grad

    gradients = parts_of(x.grad, processes)  # type: ignore[arg-type]
    for rank, (first, second, *found) in enumerate(together(processes, run)):
        weight, bias = layers[rank]
        torch.testing.assert_close(first, expected[rank])
        torch.testing.assert_close(second, expected[rank])
        for gradient, wanted in zip(found, (gradients[rank], weight.grad, bias.grad), strict=True):
            torch.testing.assert_close(gradient, wanted)


def test_alone_a_process_stands_for_the_others() -> None:
    group, own = Group(3), torch.randn(2, 2, 4)
    assert group.gather(own, 5).shape == (2, 5, 4)
    assert group.reduce_scatter(torch.randn(2, 5, 4)).shape == (2, 2, 4)
    assert group.total([own])[0] is own
