"""Calibration of the experts of a mixture: each on the tokens that the router sends to it, rare ones on all tokens of their layer.

The statistics of an expert (ranges, Hessians, smoothing) come from the tokens routed to it, since those are what it will multiply. A router
sends few tokens to some experts, and none to others; a range over a handful of tokens is worth little. So the calibration rows are counted
first, and an expert with fewer tokens than a floor runs on all tokens of its layer while the model is calibrated. Its answers to the tokens
of others are dropped: the router decides as before, and the hidden states stay as in the float model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foundation.models.layers.routed import Experts, experts_of

NAMED = 3
"""Layers that a warning names."""


@dataclass(frozen=True)
class Routing:
    """Where the tokens of the calibration rows went, by path of the module of experts; padding is counted like other tokens."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    """How many tokens each expert reads."""
    dropped: dict[str, int] = field(default_factory=dict)
    """How many tokens no expert reads, as experts have no room for them; layers without any are left out."""

    @property
    def figures(self) -> dict[str, object]:
        """What the stage reports; nothing for models without experts."""
        return {**({"experts": self.tokens} if self.tokens else {}), **({"dropped_tokens": self.dropped} if self.dropped else {})}


def tokens_routed(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], forward: Callable[[nn.Module, Mapping[str, Tensor]], object]
) -> Routing:
    """Returns how many tokens the router sends to each expert.

    Args:
        model: A model with separate experts.
        batches: Features of the calibration rows; not read if the model has no experts.
        forward: Runs the model on the features of a batch.
    """
    found = experts_of(model)
    if not found:
        return Routing()
    counts = {name: torch.zeros(module.num_experts, dtype=torch.int64) for name, module in found.items()}
    dropped = dict.fromkeys(found, 0)

    def count(name: str, module: Experts) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> None:
            reads_NE = module.routed(*inputs, **named).cpu()
            counts[name] += reads_NE.sum(dim=0)
            dropped[name] += int((~reads_NE.any(dim=1)).sum())

        return hook

    handles = [module.register_forward_pre_hook(count(name, module), with_kwargs=True) for name, module in found.items()]
    try:
        with torch.no_grad():
            for features in batches:
                forward(model, features)
    finally:
        for handle in handles:
            handle.remove()
    return Routing({name: count.tolist() for name, count in counts.items()}, {name: number for name, number in dropped.items() if number})


def rare(counts: Mapping[str, list[int]], floor: int) -> dict[str, list[int]]:
    """Returns the experts with fewer tokens than the floor, by path of their module; modules without any are left out."""
    found = {name: [expert for expert, tokens in enumerate(tokens_E) if tokens < floor] for name, tokens_E in counts.items()}
    return {name: experts for name, experts in found.items() if experts}


def rare_warning(counts: Mapping[str, list[int]], floor: int) -> list[str]:
    """Returns no or one warning about experts that saw few calibration tokens."""
    few = rare(counts, floor)
    if not few:
        return []
    number, whole = sum(map(len, few.values())), sum(map(len, counts.values()))
    named = "; ".join(
        f"{name}: {', '.join(f'{expert} ({counts[name][expert]})' for expert in few[name][:NAMED])}" for name in list(few)[:NAMED]
    )
    return [
        f"{number} of {whole} experts saw fewer than {floor} calibration tokens and are calibrated on all tokens of their layer "
        f"({named}); raise calibration.rows, or lower calibration.expert_tokens"
    ]
