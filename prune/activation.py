"""Activation: importance as activation magnitude on calibration rows, in one forward pass and without labels.

    score_s = sqrt( mean over tokens of ||a_s||^2 )      a_s: output of a head or neuron; for an expert its contribution to the block
    channels      the same for the outputs of all norms, summed over the norms
    layers        mean over tokens of 1 - cos(x, y)      x: input of the block, y: output; a block that barely changes x is unimportant

Minitron: Muralidharan et al. 2024, https://arxiv.org/abs/2407.14679, section 2.2; block influence: Men et al. 2024,
https://arxiv.org/abs/2403.03853, section 3; experts by their contribution: Lasby et al. 2025, https://arxiv.org/abs/2510.13999. Padding is
not counted. Not supported: aggregations over tokens and rows other than the root mean square.
"""

from __future__ import annotations

from torch import Tensor


def activation(x_NSd: Tensor) -> Tensor:
    """Returns the mean square of each unit's output, float64 `[S]`; the score is its root.

    Args:
        x_NSd: Outputs, float `[N, S, d]`: N tokens without padding, S units of d channels.
    """
    return x_NSd.double().square().sum(dim=2).mean(dim=0)


def block_influence(x_ND: Tensor, y_ND: Tensor) -> Tensor:
    """Returns the block influence, the mean of 1 - cos(x, y) over tokens, float64 `[]`.

    Args:
        x_ND: Input of the block, float `[N, D]`.
        y_ND: Output of the block, float `[N, D]`.
    """
    x_ND, y_ND = x_ND.double(), y_ND.double()
    cosine_N = (x_ND * y_ND).sum(dim=1) / (x_ND.norm(dim=1) * y_ND.norm(dim=1)).clamp(min=1e-30)
    turned: Tensor = (1 - cosine_N).mean()
    return turned
