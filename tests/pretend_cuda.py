"""A GPU that is played on the CPU: code that would mix devices on a real one fails here too.

A tensor that was sent to `cuda` is an `OnGpu`: it reports the device `cuda`, holds its values in CPU memory, and computes there. As on a
GPU, an operation of such a tensor with a CPU tensor is refused (a single number, and indices into such a tensor, apart), and so is
`numpy()`. It shows where values live, and nothing of the arithmetic or the speed of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

COPIES = ("aten._to_copy.default", "aten.copy_.default", "aten.to.dtype_layout")
INDEXED = ("aten.index.Tensor", "aten.index_put_.default", "aten.index_put.default")
OWN_OUTPUTS = ("aten.linalg_cholesky_ex.L",)
"""Operations for which torch makes an output itself, on the device that the library sees."""


class OnGpu(Tensor):
    """A tensor that says it is on `cuda`; its values are those of `values`, on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OnGpu:
        """Wraps a CPU tensor."""
        shape = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        found: OnGpu = Tensor._make_wrapper_subclass(cls, values.size(), **shape, device="cpu", requires_grad=values.requires_grad)
        found.values = values
        return found

    @property
    def device(self) -> torch.device:
        """The GPU that is played; to the library the wrapper is a CPU tensor, as it may not be built for CUDA."""
        return torch.device("cuda")

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The values without their history; what is assigned takes the place of the values."""
        return OnGpu(self.values.detach())

    @data.setter
    def data(self, found: Tensor) -> None:
        assert isinstance(found, OnGpu), "a CPU tensor in place of one on the GPU"
        self.values = found.values

    def __repr__(self) -> str:  # type: ignore[override]
        """Returns the values and the device."""
        return f"OnGpu({self.values!r})"

    @property
    def is_cuda(self) -> bool:
        """True."""
        return True

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes on the CPU what was asked of the GPU."""
        kwargs = dict(kwargs or {})
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        strangers = [leaf for leaf in leaves if not isinstance(leaf, OnGpu) and leaf.dim() > 0]
        if strangers and str(operation) not in (*COPIES, *INDEXED, *OWN_OUTPUTS):
            raise RuntimeError(f"Expected all tensors to be on the same device: {operation} got cuda and cpu")
        if strangers and str(operation) in INDEXED and not isinstance(args[0], OnGpu):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        args, kwargs = tree_map(_bare, (args, kwargs))
        found = operation(*args, **kwargs)
        if str(operation) == "aten.copy_.default" or found is getattr(leaves[0], "values", None):
            return leaves[0]  # an operation in place
        return tree_map(_wrapped, found)


class _Gpu(TorchFunctionMode):
    """Answers requests for the device `cuda`, which this build of torch may not have."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name in ("cuda", "cpu") and args and isinstance(args[0], Tensor):
            return _moved(args[0], name)
        if name == "to" and len(args) == 2 and isinstance(args[1], Tensor):
            found = args[0].to(args[1].dtype)
            return _moved(found, args[1].device.type) if found.dim() else found  # a single number may be anywhere; it keeps its gradient
        if name not in ("device", "_parse_to"):
            devices = [found for value in (*args, *kwargs.values()) if (found := _device(value)) is not None]
            if name == "to" and devices:
                on_cpu: Any = tree_map(lambda value: torch.device("cpu") if _device(value) else value, (args[1:], kwargs))
                return _moved(_bare(args[0]).to(*on_cpu[0], **on_cpu[1]), devices[0])
            if "cuda" in devices:
                on_cpu = tree_map(lambda value: torch.device("cpu") if _device(value) else value, (args, kwargs))
                return tree_map(_wrapped, function(*on_cpu[0], **on_cpu[1]))
        if function is torch._has_compatible_shallow_copy_type:
            return False  # a parameter that moves becomes another tensor
        if getattr(function, "__name__", "") == "numpy" and isinstance(args[0], OnGpu):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.")
        return function(*args, **kwargs)


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plays a machine with one GPU."""
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with monkeypatch.context() as patch, _Gpu():
            patch.setattr("torch.cuda.is_available", lambda: True)
            patch.setattr("torch.cuda.get_device_capability", lambda device=None: (8, 0))
            patch.setattr(torch.inference_mode, "__enter__", _enter)  # views of wrappers count versions, which inference tensors do not
            patch.setattr(torch.inference_mode, "__exit__", _exit)
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped)


def _enter(mode: Any) -> None:
    """Enters inference mode as if it only switched gradients off."""
    mode.gradients = torch.is_grad_enabled()
    torch.set_grad_enabled(mode.gradients and not mode.mode)


def _exit(mode: Any, *error: object) -> None:
    torch.set_grad_enabled(mode.gradients)


def _bare(value: Any) -> Any:
    return value.values if isinstance(value, OnGpu) else value


def _wrapped(value: Any) -> Any:
    return OnGpu(value) if isinstance(value, Tensor) and not isinstance(value, OnGpu) else value


def _moved(values: Tensor, device: str) -> Tensor:
    """Returns the tensor on a device; a copy where it was on the other, as between the two memories of a real machine."""
    if isinstance(values, OnGpu) == (device == "cuda"):
        return values
    return OnGpu(values.detach().clone()) if device == "cuda" else _bare(values).clone()


def _device(value: Any) -> str | None:
    """Returns cuda or cpu where an argument is a device."""
    name = value if isinstance(value, str) else value.type if isinstance(value, torch.device) else ""
    return name.partition(":")[0] if name.startswith(("cuda", "cpu")) else None
