"""A stand-in for the module that the server gives its Python models. It imports nothing of ours: processes without our packages load it."""

import types
from typing import ClassVar


class Tensor:
    def __init__(self, name, array):
        self.name, self.array = name, array

    def as_numpy(self):
        return self.array


class Response:
    def __init__(self, output_tensors=(), error=None):
        self.tensors, self.error = {tensor.name: tensor.array for tensor in output_tensors}, error


class TritonError(Exception):
    INTERNAL, INVALID_ARG = 1, 2

    def __init__(self, message, code=None):
        super().__init__(message)
        self.code = code


class Metric:
    def __init__(self):
        self.value = 0.0

    def increment(self, value):
        assert value > 0
        self.value += value

    def set(self, value):
        self.value = value


class MetricFamily:
    """A family of metrics; `made` holds all families that were made, by name."""

    COUNTER, GAUGE = "COUNTER", "GAUGE"
    made: ClassVar = {}

    def __init__(self, name, description, kind):
        assert description
        assert kind in ("COUNTER", "GAUGE")
        self.metrics = {}
        self.made[name] = self

    def Metric(self, labels):
        return self.metrics.setdefault(tuple(sorted(labels.items())), Metric())


def stand_in() -> types.ModuleType:
    module = types.ModuleType("triton_python_backend_utils")
    module.Tensor, module.InferenceResponse, module.TritonError = Tensor, Response, TritonError
    module.MetricFamily = MetricFamily
    module.get_input_tensor_by_name = lambda request, name: request.get(name)
    return module
