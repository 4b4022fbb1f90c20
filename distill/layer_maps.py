"""Which layer of the teacher each layer of the student learns from. Layers count from 1, as in the papers; 0 is the embeddings.

    uniform   g(m) = floor(m L_t / L_s + 1/2), m = 1 ... L_s: the last learns from the last (https://arxiv.org/abs/1909.10351, section 3)
    skip      the same for m = 1 ... L_s - 1: the answers teach the last layer (PKD-Skip, https://arxiv.org/abs/1908.09355, section 3.2)
    last      g(m) = L_t - L_s + m, m = 1 ... L_s - 1 (PKD-Last)
    a list    g(1), g(2), ...

Left out: searching the map.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from compress.errors import InputError

LayerMap = Literal["uniform", "skip", "last"] | Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]


def pairs(layers: LayerMap, student: int, teacher: int, key: str) -> tuple[tuple[int, int], ...]:
    """Returns the pairs (layer of the student, layer of the teacher), counted from 1.

    Args:
        layers: The map.
        student: Layers of the student.
        teacher: Layers of the teacher.
        key: Key path of the map, for messages.

    Raises:
        InputError: A layer is not there, or no pair is left.
    """
    if isinstance(layers, tuple):
        if len(layers) > student or max(layers) > teacher:
            raise InputError(f"{key}: {list(layers)} given; at most {student} layers, each from 1 to {teacher}, are allowed")
        return tuple(enumerate(layers, start=1))
    if teacher < student:
        raise InputError(f"{key}: {layers} given; the student has {student} layers, the teacher {teacher}: give a list")
    if layers == "uniform":
        return tuple((m, _proportional(m, student, teacher)) for m in range(1, student + 1))
    if student == 1:
        raise InputError(f"{key}: {layers} given; it leaves the last layer out, and the student has only one: give uniform")
    if layers == "skip":
        return tuple((m, _proportional(m, student, teacher)) for m in range(1, student))
    return tuple((m, teacher - student + m) for m in range(1, student))


def _proportional(layer: int, student: int, teacher: int) -> int:
    return (2 * layer * teacher + student) // (2 * student)
