"""Hard targets: the loss against the labels, next to what the student learns from its teacher.

classification  loss_b = -log softmax(z_b)[y_b]
regression      loss_b = (z_b - y_b)^2
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def hard_target(logits_bC: Tensor, labels_b: Tensor, regression: bool = False) -> Tensor:
    """Returns the cross-entropy (classification) or the squared error (regression) of each row, float32 `[b]`.

    Args:
        logits_bC: Student logits, float32 `[b, C]`.
        labels_b: Class ids, int64 `[b]`; regression targets, float32 `[b]`.
        regression: Whether the task is a regression.
    """
    if regression:
        return (logits_bC[:, 0] - labels_b).square()
    return functional.cross_entropy(logits_bC, labels_b, reduction="none")
