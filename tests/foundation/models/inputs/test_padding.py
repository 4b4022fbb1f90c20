"""Padding: rows that stand for no token are left out."""

import torch

from foundation.models.inputs.padding import mask_of, real_rows


def test_rows_of_padding_are_left_out_in_the_order_of_the_rest() -> None:
    x_nLI = torch.arange(12.0).reshape(2, 3, 2)
    mask_nL = torch.tensor([[1, 0, 1], [0, 0, 1]])
    assert real_rows(x_nLI, {"attention_mask": mask_nL}).tolist() == [[0.0, 1.0], [4.0, 5.0], [10.0, 11.0]]


def test_without_a_mask_and_in_another_shape_every_row_counts() -> None:
    x_nLI, mask_nL = torch.arange(12.0).reshape(2, 3, 2), torch.zeros(2, 3, dtype=torch.int64)
    assert torch.equal(real_rows(x_nLI, {}), x_nLI.reshape(6, 2))
    assert torch.equal(real_rows(x_nLI[:, 0], {"attention_mask": mask_nL}), x_nLI[:, 0])
    assert torch.equal(real_rows(x_nLI[:, :2], {"attention_mask": mask_nL}), x_nLI[:, :2].reshape(4, 2))


def test_frames_of_a_waveform_are_real_where_the_sample_at_their_place_is() -> None:
    mask_nT = (torch.arange(40) < torch.tensor([[40], [21], [20], [1]])).long()
    features = {"input_values": torch.zeros(4, 40), "attention_mask": mask_nT}
    expected = [[bool(mask_nT[row, frame * 40 // 8]) for frame in range(8)] for row in range(4)]
    found = mask_of(features, 8)
    assert found is not None
    assert found.tolist() == expected
    assert [sum(row) for row in expected] == [8, 5, 4, 1]
    x_nIL = torch.arange(4 * 2 * 8.0).reshape(4, 2, 8)  # what a convolution writes
    rows = [x_nIL[row, :, frame] for row in range(4) for frame in range(8) if expected[row][frame]]
    assert torch.equal(real_rows(x_nIL, features, channel_axis=1), torch.stack(rows))
    assert mask_of({"input_values": torch.zeros(4, 40)}, 8) is None
    tokens = {"input_ids": mask_nT, "attention_mask": mask_nT}
    assert torch.equal(mask_of(tokens, 40), mask_nT.bool())
