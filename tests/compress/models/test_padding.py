"""Padding: rows that stand for no token are left out."""

import torch

from compress.models.padding import real_rows


def test_rows_of_padding_are_left_out_in_the_order_of_the_rest() -> None:
    x_nLI = torch.arange(12.0).reshape(2, 3, 2)
    mask_nL = torch.tensor([[1, 0, 1], [0, 0, 1]])
    assert real_rows(x_nLI, {"attention_mask": mask_nL}).tolist() == [[0.0, 1.0], [4.0, 5.0], [10.0, 11.0]]


def test_without_a_mask_and_in_another_shape_every_row_counts() -> None:
    x_nLI, mask_nL = torch.arange(12.0).reshape(2, 3, 2), torch.zeros(2, 3, dtype=torch.int64)
    assert torch.equal(real_rows(x_nLI, {}), x_nLI.reshape(6, 2))
    assert torch.equal(real_rows(x_nLI[:, 0], {"attention_mask": mask_nL}), x_nLI[:, 0])
    assert torch.equal(real_rows(x_nLI[:, :2], {"attention_mask": mask_nL}), x_nLI[:, :2].reshape(4, 2))
