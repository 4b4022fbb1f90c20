"""A stand-in for the module that the server gives its Python models. It imports nothing of ours: processes without our packages load it."""

import threading
import types
from typing import ClassVar

FINAL = 1
"""Flag of the last response to a request."""


class Tensor:
    def __init__(self, name, array):
        self.name, self.array = name, array

    def as_numpy(self):
        return self.array


class Response:
    def __init__(self, output_tensors=(), error=None):
        self.tensors, self.error = {tensor.name: tensor.array for tensor in output_tensors}, error


class TritonError(Exception):
    INTERNAL, INVALID_ARG, UNAVAILABLE = 1, 2, 3

    def __init__(self, message, code=None):
        super().__init__(message)
        self.code = code


class Logger:
    """Keeps warnings."""

    warnings: ClassVar = []

    @classmethod
    def log_warn(cls, line):
        cls.warnings.append(line)


class Sender:
    """Takes the responses to one request of a decoupled model; `first` and `last` are set as they come."""

    def __init__(self):
        self.responses, self.cancelled = [], False
        self.first, self.last = threading.Event(), threading.Event()

    def send(self, response, flags=0):
        assert not self.last.is_set()
        self.responses.append(response)
        self.first.set()
        if flags == FINAL:
            self.last.set()

    def is_cancelled(self):
        return self.cancelled


class Given:
    """An input of such a request."""

    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class Request:
    """A request to a decoupled model."""

    def __init__(self, **arrays):
        self.sender = Sender()
        self._inputs = [Given(name, array) for name, array in arrays.items()]

    def inputs(self):
        return self._inputs

    def get_response_sender(self):
        return self.sender


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
    module.MetricFamily, module.Logger = MetricFamily, Logger
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    module.get_input_tensor_by_name = lambda request, name: request.get(name)
    return module
