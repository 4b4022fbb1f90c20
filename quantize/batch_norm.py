"""Folds batch norms into the convolutions before them, so that weights are rounded as they are multiplied.

At inference a batch norm is a factor and a shift per output channel o of its convolution:

    y_o = g_o (W_o * x + b_o - m_o) / sqrt(v_o + eps) + h_o  =  (f_o W_o) * x + f_o b_o + (h_o - f_o m_o),     f_o = g_o / sqrt(v_o + eps)

with weight g, bias h, running mean m and running variance v. W and b take the factor and the shift, in place, so that calibration, bias
correction and training see one layer with a bias. The norm stays where it is, as the stock model needs it: g = 1, m = 0, v = 1 - eps and
h = 0. At the end (`return_biases`) a bias that the stock convolution has no place for goes to h. Both are exact: v + eps is 1 in float32.
Exporters merge such a norm into the bias of its convolution, which leaves nothing between an int8 convolution and what follows it.

A norm is folded if it reads every output of one convolution, and nothing else reads them; this is observed while the model runs on a few
rows. Its statistics are fixed from then on, in training too.

Left out: batch norms after linear layers, and before their convolution.

Shape suffixes: O outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from foundation.models.architecture.trace import tensors_in
from foundation.schemes.int8_convolution import CONVOLUTIONS, Convolution, per_channel

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
BATCH_NORM = "batch_norm"
Forward = Callable[[nn.Module, Mapping[str, Tensor]], object]


class Shift(_BatchNorm):
    """A folded batch norm: adds its bias. Its parameters and buffers have the names of the stock class, in which they compute the same.

    Args:
        norm: The norm that it replaces.
        keeps_bias: Whether the bias of its convolution comes back to it.
    """

    def __init__(self, norm: _BatchNorm, keeps_bias: bool) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, affine=True)
        assert norm.running_mean is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.running_mean.zero_()
        self.running_var.fill_(1 - norm.eps)
        if norm.num_batches_tracked is not None:
            self.num_batches_tracked.copy_(norm.num_batches_tracked)
        self.requires_grad_(False).to(norm.running_mean.device)
        self.keeps_bias = keeps_bias
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x [B, O, size...] plus the shift."""
        return x + per_channel(self.bias, x).to(x)


def fold_batch_norms(model: nn.Module, layers: Collection[str], features: Mapping[str, Tensor], forward: Forward) -> dict[str, str]:
    """Folds batch norms into convolutions, in place; the model computes the same afterwards, up to float rounding.

    Args:
        model: The float model, in evaluation mode.
        layers: Names of the layers to quantize; norms after other layers stay as they are.
        features: Features of a few rows.
        forward: Runs the model on features.

    Returns:
        The folded norm of each convolution that had one, by module name.
    """
    pairs = find_pairs(model, layers, features, forward)
    for name, norm_name in pairs.items():
        convolution, norm = model.get_submodule(name), model.get_submodule(norm_name)
        assert isinstance(convolution, CONVOLUTIONS)
        assert isinstance(norm, _BatchNorm)
        model.set_submodule(norm_name, folded(convolution, norm))
    return pairs


def folded(convolution: Convolution, norm: _BatchNorm) -> Shift:
    """Puts the factor and the shift of a norm into a convolution, in place; returns what is left of the norm."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    gain_O = torch.ones_like(norm.running_var) if norm.weight is None else norm.weight.detach()
    bias_O = torch.zeros_like(norm.running_var) if norm.bias is None else norm.bias.detach()
    factor_O = gain_O.double() / (norm.running_var.double() + norm.eps).sqrt()
    weight = convolution.weight.detach()
    convolution.weight.data = (weight.double() * factor_O.reshape(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)
    shift_O = bias_O.double() - norm.running_mean.double() * factor_O
    left = Shift(norm, keeps_bias=convolution.bias is None)
    if convolution.bias is not None:
        shift_O += convolution.bias.detach().double() * factor_O
    convolution.bias = nn.Parameter(shift_O.to(weight.dtype))
    return left


def return_biases(model: nn.Module, pairs: Mapping[str, str]) -> None:
    """Moves the bias of convolutions that have none in the stock model to their folded norms, in place.

    Args:
        model: The model.
        pairs: What `fold_batch_norms` returned.
    """
    for name, norm_name in pairs.items():
        convolution, norm = model.get_submodule(name), model.get_submodule(norm_name)
        assert isinstance(convolution, CONVOLUTIONS)
        assert isinstance(norm, Shift)
        if norm.keeps_bias:
            assert convolution.bias is not None
            norm.bias.data = convolution.bias.detach()
            convolution.register_parameter("bias", None)


def find_pairs(model: nn.Module, layers: Collection[str], features: Mapping[str, Tensor], forward: Forward) -> dict[str, str]:
    """Returns the batch norm that is the only reader of a convolution, by the name of the convolution, in model order."""
    owners = Counter(id(value) for module in model.modules() for value in module.parameters(recurse=False))
    own = {
        name: module for name, module in model.named_modules() if all(owners[id(value)] == 1 for value in module.parameters(recurse=False))
    }
    candidates = {name: module for name, module in own.items() if name in layers and isinstance(module, CONVOLUTIONS)}
    norms = {name: module for name, module in own.items() if type(module) in NORMS and getattr(module, "running_var", None) is not None}
    outputs: dict[str, list[Tensor]] = {}
    inputs: dict[str, list[Tensor]] = {}

    def keep_output(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda module, given, output: outputs.setdefault(name, []).append(output)

    def keep_input(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, given: inputs.setdefault(name, []).append(given[0])

    handles = [module.register_forward_hook(keep_output(name)) for name, module in candidates.items()]
    handles += [module.register_forward_pre_hook(keep_input(name)) for name, module in norms.items()]
    readers = _Readers()
    try:
        with torch.no_grad(), readers:
            forward(model, features)
    finally:
        for handle in handles:
            handle.remove()
    reader = {tuple(id(tensor) for tensor in tensors): name for name, tensors in inputs.items()}
    found = {name: reader.get(tuple(id(tensor) for tensor in tensors)) for name, tensors in outputs.items()}
    alone = {name for name, tensors in outputs.items() if all(readers.of(tensor) == [BATCH_NORM] for tensor in tensors)}
    return {name: norm for name in candidates if name in alone and (norm := found[name]) is not None}


class _Readers(TorchFunctionMode):
    """Records which functions read each tensor; keeps all tensors alive, so that ids stay unique."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, list[str]] = {}
        self._alive: list[object] = []

    def of(self, tensor: Tensor) -> list[str]:
        """Returns the names of the functions that read a tensor."""
        return self._names.get(id(tensor), [])

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self._alive.append((args, kwargs, result))
        if result is None or any(True for _ in tensors_in(result)):  # calls that return only shapes or dtypes read no values
            for tensor in {id(tensor): tensor for tensor in tensors_in((args, tuple((kwargs or {}).values())))}:
                self._names.setdefault(tensor, []).append(str(getattr(func, "__name__", func)))
        return result
