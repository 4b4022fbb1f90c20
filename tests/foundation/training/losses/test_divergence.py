"""The divergence from a teacher: the bits that autograd computes, piece by piece, and no more memory than the logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from foundation.training.losses import divergence as module
from foundation.training.losses.divergence import divergence


def written_out(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """The definition in operations of autograd."""
    ours, theirs = (torch.log_softmax(values / temperature, dim=-1) for values in (logits, target))
    return functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=-1)


@pytest.mark.parametrize("most", [1, 7, 24, 2**24])
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    width=st.integers(1, 9),
    temperature=st.sampled_from([1.0, 2.0, 0.3]),
    size=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_have_the_bits_of_autograd(
    most: int, shape: list[int], width: int, temperature: float, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, target = (size * torch.randn(*shape, width, generator=generator) for _ in range(2))
    weight, found = torch.randn(*shape, generator=generator), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST", most)
        for compute in (divergence, written_out):
            logits = values.clone().requires_grad_()
            result = compute(logits, target, temperature)
            (result * weight).sum().backward()
            found.append((result.detach(), logits.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("most", [30, 2**24])
def test_a_part_of_the_logits_is_no_copy(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a language model predicts is a view of its logits; no tensor but them is kept."""
    monkeypatch.setattr(module, "MOST", most)
    logits, target, kept = torch.randn(3, 5, 8, requires_grad=True), torch.randn(3, 5, 8), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = divergence(logits[:, :-1], target[:, :-1], 2.0)
    assert set(kept) == {logits.untyped_storage().data_ptr(), target.untyped_storage().data_ptr()}
    found.sum().backward()
    expected = torch.softmax(logits.detach() / 2, -1) - torch.softmax(target / 2, -1)
    torch.testing.assert_close(logits.grad[:, :-1], expected[:, :-1] / 2)  # type: ignore[index]
    assert not logits.grad[:, -1].any()  # type: ignore[index]


def test_pieces_are_as_large_as_they_may_be_and_cover_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 24)
    for shape, count in (((4, 6), 1), ((5, 6), 2), ((2, 3, 8), 2), ((2, 5, 8), 4), ((2, 2, 100), 4), ((0, 3, 8), 0)):
        seen, pieces = torch.zeros(shape), list(module._pieces(shape))
        for piece in pieces:
            assert seen[piece].numel() <= max(24, shape[-1])
            seen[piece] += 1
        assert torch.equal(seen, torch.ones(shape))
        assert len(pieces) == count
