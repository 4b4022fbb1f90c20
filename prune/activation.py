"""Activation: how much a structure says on real rows, in one forward pass and without labels.

    score_s = sqrt( mean over tokens of ||a_s||^2 )      a_s: output of a head or neuron; of an expert, its share of the output of the block
    channels      the same, of the outputs of all norms, added up
    layers        mean over tokens of 1 - cos(x, y)      x goes into the block, y comes out: one that turns nothing says little

Minitron: Muralidharan et al. 2024, https://arxiv.org/abs/2407.14679, section 2.2; block importance: Men et al. 2024,
https://arxiv.org/abs/2403.03853, section 3; experts by what they add: Lasby et al. 2025, https://arxiv.org/abs/2510.13999. Padding does not
count. Left out: other aggregations over tokens and rows than the root of the mean square.
"""

from __future__ import annotations

from torch import Tensor


def activation(x_NSd: Tensor) -> Tensor:
    """Returns the mean square of what each structure says, float64 `[S]`; the score is its root.

    Args:
        x_NSd: Outputs, float `[N, S, d]`: N tokens without padding, d numbers of a structure.
    """
    return x_NSd.double().square().sum(dim=2).mean(dim=0)


def turning(x_ND: Tensor, y_ND: Tensor) -> Tensor:
    """Returns how much a block turns each token, mean of 1 - cos(x, y), float64 `[]`.

    Args:
        x_ND: What goes in, float `[N, D]`.
        y_ND: What comes out.
    """
    x_ND, y_ND = x_ND.double(), y_ND.double()
    cosine_N = (x_ND * y_ND).sum(dim=1) / (x_ND.norm(dim=1) * y_ND.norm(dim=1)).clamp(min=1e-30)
    turned: Tensor = (1 - cosine_N).mean()
    return turned
