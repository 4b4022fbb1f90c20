"""Names of the weights of experts that are modules: `... .expert_3.wi.weight` (`foundation.models.layers.listed_experts`)."""

from __future__ import annotations

import re
from collections.abc import Iterable

VISITED = {"nllb-moe": 2, "switch_transformers": 1}
"""Experts that a token visits, which these configs do not say, by model type."""
_NUMBERED = re.compile(r"(.+\.)expert_(\d+)(\..+)")


def expert_name(number: int) -> str:
    """Returns the name of the module of an expert."""
    return f"expert_{number}"


def numbered(name: str) -> tuple[str, int, str] | None:
    """Returns what stands before and after the number of an expert in the name of a weight, and the number; None for other weights."""
    found = _NUMBERED.fullmatch(name)
    return None if found is None else (found[1], int(found[2]), found[3])


def renumbered(name: str, number: int) -> str:
    """Returns the name of the same weight of another expert; `name` has to be of one."""
    found = numbered(name)
    assert found is not None, name
    return f"{found[0]}{expert_name(number)}{found[2]}"


def by_expert(names: Iterable[str]) -> list[list[str]]:
    """Returns the weights of experts among some names: for each kind of weight its names in the order of experts."""
    kinds: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        found = numbered(name)
        if found is not None:
            kinds.setdefault((found[0], found[2]), {})[found[1]] = name
    return [[of_kind[number] for number in sorted(of_kind)] for _, of_kind in sorted(kinds.items())]
