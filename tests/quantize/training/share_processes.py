"""Int8 layers in training that two processes share; run by `test_shares.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundation.machine.parallel import Team, joined
from foundation.machine.sharding import full
from foundation.schemes.int8 import LayerScales, levels, weight_scale
from foundation.training.few_parameters.lora import Lora
from foundation.training.processes.layer_share import LayerShare
from quantize.choices import Learned
from quantize.training.low_rank import changed_by_low_rank
from quantize.training.qat import insert

CASES: dict[str, dict[str, Any]] = {
    "lsq": {},
    "no biases": {"bias": False},
    "pact": {"learned": "pact"},
    "fixed": {"learned": "fixed"},
    "seven bits": {"bits": 7},
    "smoothed": {"smoothed": True},
    "low rank": {"lora": Lora(rank=3)},
    "low rank, smoothed": {"lora": Lora(rank=3), "smoothed": True},
    "one row": {"rows": 1},
    "one neuron each": {"inner": 2},
    "one input": {"inputs": 1},
    "long": {"inner": 2304, "rows": 3},
}
"""Settings of `setting`, by name."""


def setting(
    rows: int = 9,
    inputs: int = 10,
    inner: int = 12,
    outputs: int = 7,
    bias: bool = True,
    bits: int = 8,
    smoothed: bool = False,
    learned: Learned = "lsq",
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Returns two int8 layers in training that clip weights and inputs, their input `[rows, inputs]`, and the gradient of their output."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, inner, bias=bias), nn.GELU(), nn.Linear(inner, outputs, bias=bias))
    scales: dict[str, LayerScales] = {}
    with torch.no_grad():
        for name, size in (("0", 0.02), ("2", 0.01)):
            layer: Any = model.get_submodule(name)
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
            smooth_I = torch.rand(layer.in_features, generator=draw) + 0.5 if smoothed else None
            scale_O = 0.8 * weight_scale(layer.weight if smooth_I is None else layer.weight * smooth_I, levels(bits))
            scales[name] = LayerScales(scale_O, torch.tensor(size), bits, smooth_I)
    insert(model, scales, {"0": "0", "2": "2"}, learned, rate=10.0)
    return model, torch.randn(rows, inputs, generator=draw), torch.randn(rows, outputs, generator=draw)


def results(case: dict[str, Any], share: Team | None = None) -> dict[str, Tensor]:
    """Returns what the two layers compute in training and evaluation, and all gradients, whole.

    Args:
        case: Settings of `setting`, and `lora`.
        share: The processes that share the layers; None for one process.
    """
    settings = {name: value for name, value in case.items() if name != "lora"}
    model, x, gradient = setting(**settings)
    changed_by_low_rank(model, case.get("lora"), 0, "quantize").__enter__()  # it is left when layers are whole again
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("b_Or"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    if share is not None:
        for name, columns in (("0", True), ("2", False)):
            layer: Any = model.get_submodule(name)
            layer.share(LayerShare(share.mesh()["tensor"], columns))
    x.requires_grad_()
    y = model(x)
    y.backward(gradient)
    assert x.grad is not None
    found = {"trained": y.detach(), "x": x.grad}
    found |= {name: full(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}
    with torch.no_grad():
        return {**found, "evaluated": model.eval()(x.detach())}


def together(file: Path) -> None:
    """What two processes do; writes the file."""
    with joined() as team:
        both = {name: results(case, replace(team, tensor=2)) for name, case in CASES.items()}
        for found in both.values():  # what is whole is the same in both, to the last bit
            for value in found.values():
                one, other = team.gather(value.contiguous())
                assert torch.equal(one, other)
        if team.is_first:
            torch.save(both, file)
