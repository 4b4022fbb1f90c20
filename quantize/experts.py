"""Calibration of the experts of a mixture: each on the tokens that the router sends to it, rare ones on all tokens of their layer.

The statistics of an expert (ranges, Hessians, smoothing) come from the tokens routed to it, since those are what it will multiply. A router
sends few tokens to some experts, and none to others; a range over a handful of tokens is worth little. So the calibration rows are counted
first, and an expert with fewer tokens than a floor runs on all tokens of its layer while the model is calibrated. Its answers to the tokens
of others are dropped: the router decides as before, and the hidden states stay as in the float model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from foundation.models.layers.experts import SeparateExperts, separate_experts

NAMED = 3
"""Layers that a warning names."""


def tokens_routed(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], forward: Callable[[nn.Module, Mapping[str, Tensor]], object]
) -> dict[str, list[int]]:
    """Returns how many tokens the router sends to each expert, by path of the module of experts.

    Args:
        model: A model with separate experts.
        batches: Features of the calibration rows.
        forward: Runs the model on the features of a batch.
    """
    found = separate_experts(model)
    counts = {name: torch.zeros(module.num_experts, dtype=torch.int64) for name, module in found.items()}

    def count(name: str, module: SeparateExperts) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> None:
            chosen = inputs[1] if len(inputs) > 1 else named["top_k_index"]
            kept = chosen.flatten().cpu()
            counts[name] += torch.bincount(kept[kept < module.num_experts], minlength=module.num_experts)

        return hook

    handles = [module.register_forward_pre_hook(count(name, module), with_kwargs=True) for name, module in found.items()]
    try:
        with torch.no_grad():
            for features in batches:
                forward(model, features)
    finally:
        for handle in handles:
            handle.remove()
    return {name: count.tolist() for name, count in counts.items()}


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
