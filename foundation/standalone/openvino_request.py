"""One request of a compiled OpenVINO model whose inputs are bound to memory. Needs numpy and openvino; it is copied to servers.

OpenVINO's own `infer` takes arrays, makes a tensor of each and copies it, in every call: 0.1 ms, a tenth of a small model's time, and of an
encoder-decoder all keys and values of the source for every token. Here nothing is copied that need not be:

    known shapes    the request has memory for each input; arrays are written into that. Token ids are int32 there (`compiled`)
    any shape       the request reads arrays in place
    bound           the same, for arrays that stay: they are given once, for many runs
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray
from openvino.preprocess import PrePostProcessor

PRECISION = "INFERENCE_PRECISION_HINT"


def reshape(network: Any, shape: Sequence[int]) -> None:
    """Fixes the leading axes of all inputs, in place."""
    rest = {port.any_name: list(port.partial_shape)[len(shape) :] for port in network.inputs}
    network.reshape({name: [*shape, *(axis.get_length() for axis in axes)] for name, axes in rest.items()})


def computes_bf16(core: Any) -> bool:
    """Whether the CPU has bfloat16 arithmetic, as OpenVINO reports it."""
    return "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def for_this_cpu(core: Any, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings to compile with, in float32 instead of bfloat16, and with a warning, where the CPU has no bfloat16 arithmetic.

    With AVX2 alone OpenVINO takes float32 by itself. With AVX-512 alone it emulates bfloat16, although it does not count it among what the
    CPU can do: a product of 512 x 1024 x 1024 takes 235 ms where float32 takes 7 (2026.4.1, Ice Lake class).
    """
    if properties.get(PRECISION) != "bf16" or computes_bf16(core):
        return dict(properties)
    warnings.warn("this CPU has no bfloat16 arithmetic: the model that was built for it is computed in float32", stacklevel=2)
    return {**properties, PRECISION: "f32"}


def compiled(core: Any, network: Any, shape: Sequence[int], properties: Mapping[str, Any]) -> Any:
    """Returns a network, which stays as it is, compiled for the CPU and for rows of one shape.

    Inputs of a known shape take int32 in place of int64: the CPU computes with that, and would convert each of them anew in every run.

    Args:
        core: OpenVINO.
        network: The network.
        shape: The leading axes of all inputs, the batch included; () compiles it for any shape.
        properties: Settings.
    """
    if shape:
        network = network.clone()
        reshape(network, shape)
        narrow = PrePostProcessor(network)
        for port in network.inputs:
            if port.get_element_type() == openvino.Type.i64:
                narrow.input(port.any_name).tensor().set_element_type(openvino.Type.i32)
        network = narrow.build()
    return core.compile_model(network, "CPU", for_this_cpu(core, properties))


class Request:
    """A compiled model and one request of it.

    Args:
        model: The compiled model.
        known: Whether the shapes of its inputs are known; each run then gives all of them.
    """

    def __init__(self, model: Any, *, known: bool = False) -> None:
        self.model, self._request = model, model.create_infer_request()
        self._own: list[tuple[frozenset[str], NDArray[Any]]] = []
        """Names and memory of the inputs of a known shape. The compiler adds the names of operations that it removes behind an input."""
        if known:
            self._own = [(frozenset(port.names), self._request.get_tensor(port).data) for port in model.inputs]
        self._lent: dict[str, NDArray[Any]] = {}
        """Arrays that the request reads in place: the request itself does not keep their memory alive."""

    def bind(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Lets the request read arrays in place, in every run until their names are given again.

        Raises:
            RuntimeError: An array has another type or another number of axes than the input.
        """
        for name, values in inputs.items():
            array = np.require(values, requirements=("C_CONTIGUOUS", "WRITEABLE"))  # OpenVINO takes no other, though it only reads
            self._request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
            self._lent[name] = array

    def infer(self, inputs: Mapping[str, NDArray[Any]], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Runs the model on inputs, and on those that are bound; returns a copy of its first output.

        Args:
            inputs: Arrays by the names of inputs.
            out: Where the copy goes, of the shape of the output; default: a new array.

        Raises:
            RuntimeError: As for `bind`.
            TypeError: An array has another type than an input whose shape is known; int64 goes into int32.
            ValueError: It, or `out`, has another shape.
            KeyError: An input of a known shape is missing.
        """
        copied: set[str] = set()
        for names, memory in self._own:
            name = next((name for name in names if name in inputs), min(names))
            copied.add(name)
            if inputs[name].shape != memory.shape:  # a single row would be repeated
                raise ValueError(f"{name}: shape {list(inputs[name].shape)} given; the model is compiled for {list(memory.shape)}")
            np.copyto(memory, inputs[name], casting="same_kind" if memory.dtype == np.int32 else "equiv")
        self.bind({name: values for name, values in inputs.items() if name not in copied})
        self._request.start_async()
        self._request.wait()
        found = self._request.get_output_tensor(0).data
        if out is None:
            return np.array(found, dtype=np.float32)
        if out.shape != found.shape:  # a single row would be repeated
            raise ValueError(f"out: shape {list(out.shape)} given; the output has {list(found.shape)}")
        np.copyto(out, found)
        return out

    def outputs(self) -> dict[str, NDArray[Any]]:
        """Returns copies of all outputs of the last run, by each of their names."""
        found = [(port.names, np.array(self._request.get_tensor(port).data)) for port in self.model.outputs]
        return {name: values for names, values in found for name in names}

    def reset_state(self) -> None:
        """Forgets what the model keeps from run to run."""
        self._request.reset_state()
