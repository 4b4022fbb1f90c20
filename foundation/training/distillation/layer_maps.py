"""Maps each student layer to the teacher layer it learns from. Layers count from 1, as in the papers; 0 is the embeddings.

    uniform   g(m) = floor(m L_t / L_s + 1/2), m = 1 ... L_s: last learns from last (https://arxiv.org/abs/1909.10351, section 3)
    skip      the same for m = 1 ... L_s - 1: the logits teach the last layer (PKD-Skip, https://arxiv.org/abs/1908.09355, section 3.2)
    last      g(m) = L_t - L_s + m, m = 1 ... L_s - 1 (PKD-Last)
    a list    g(1), g(2), ...
    searched  for each row the ascending g with the least total distance, g = argmin sum_m D_m,g(m) with g(1) < g(2) < ...

`searched` is derived from the dynamic layer mapping of CoFi (https://arxiv.org/abs/2204.00408, section 3.3). In CoFi each of a few selected
teacher layers picks its closest student layer independently, once per batch. Here each student layer picks a teacher layer, and dynamic
programming finds the best ascending assignment for each row, so splitting a batch changes nothing. As in the paper, no gradient flows
through the choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundation.core.errors import InputError
from foundation.training.losses.distillation.loss import LayerMap


def pairs(layers: LayerMap, student: int, teacher: int, key: str) -> tuple[tuple[int, int], ...]:
    """Returns the pairs (student layer, teacher layer), counted from 1.

    Args:
        layers: The map.
        student: Number of student layers.
        teacher: Number of teacher layers.
        key: Key path of the map, for error messages.

    Raises:
        InputError: A layer does not exist, or no pair is left.
    """
    if isinstance(layers, tuple):
        if len(layers) > student or max(layers) > teacher:
            raise InputError(key, f"{list(layers)} given", remedy=f"give at most {student} layers, each from 1 to {teacher}")
        return tuple(enumerate(layers, start=1))
    if teacher < student:
        raise InputError(key, f"{layers} given", f"the student has {student} layers, the teacher {teacher}", "give a list")
    if layers == "uniform":
        return tuple((m, _proportional(m, student, teacher)) for m in range(1, student + 1))
    if student == 1:
        raise InputError(key, f"{layers} given", "it leaves the last layer out, and the student has only one", "give uniform")
    if layers == "skip":
        return tuple((m, _proportional(m, student, teacher)) for m in range(1, student))
    return tuple((m, teacher - student + m) for m in range(1, student))


@torch.no_grad()
def searched(distance_bST: Tensor) -> Tensor:
    """Returns the teacher layer for each student layer in the ascending map with the least total distance, int64 `[b, S]`, from 0.

    Dynamic programming over C_m,t = D_m,t + min over t' < t of C_m-1,t'. Only t = m + o with o from 0 to T - S are considered: these leave
    enough layers for the rest, so a map exists for any distances. If a distance is NaN the map passes through it, so that the loss becomes
    NaN too.

    Args:
        distance_bST: Distance between student layer s and teacher layer t, float `[b, S, T]`, S <= T.
    """
    layers = distance_bST.shape[1]
    spare = distance_bST.shape[2] - layers + 1
    cost_bO, origins = distance_bST[:, 0, :spare].double(), []
    for layer in range(1, layers):
        least_bO, origin_bO = cost_bO.cummin(dim=1)
        origins.append(origin_bO)
        cost_bO = distance_bST[:, layer, layer : layer + spare].double() + least_bO
    chosen = [cost_bO.argmin(dim=1)]
    for origin_bO in reversed(origins):
        chosen.append(origin_bO.gather(1, chosen[-1][:, None])[:, 0])
    return torch.stack(chosen[::-1], dim=1) + torch.arange(layers, device=distance_bST.device)


def _proportional(layer: int, student: int, teacher: int) -> int:
    return (2 * layer * teacher + student) // (2 * student)
