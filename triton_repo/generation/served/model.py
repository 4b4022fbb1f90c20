"""Triton Python model of a language model: reads requests, and passes the answers to an engine with its own thread.

Its folder also holds the other files of this package that it needs, and the folder of its engine: `genai/` of a decoder in OpenVINO GenAI,
`onnx/` of one in ONNX Runtime, `kernels/` of one on our kernels, `seq2seq/` of an encoder-decoder. The model is decoupled: `execute`
returns at once, and each request gets as many responses as its answer has pieces. Requests with a structure wait for its grammar in a
thread of their own.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.dont_write_bytecode = True  # this folder is hashed: nothing may be added to it
shutil.rmtree(Path(__file__).parent / "__pycache__", ignore_errors=True)  # Python wrote this file's bytecode before its first line ran
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # no telemetry

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from .answer import Outputs, in_a_line, tensors
from .outbox import Lane, Outbox
from .request import FAILED, MODEL_FAILED, Refused, Request, read

FOLDER = Path(__file__).parent


class TritonPythonModel:
    """The interface that the Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads tokenizer and model."""
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        if parameters["architecture"] == "encoder_decoder":
            from .seq2seq import open_model
        elif parameters["mode"] == "batched":
            from .onnx import open_model
        elif parameters["mode"] == "packed":
            from .kernels import open_model
        else:
            from .genai import open_model
        ordinal = args["model_instance_device_id"] if args["model_instance_kind"] == "GPU" else ""
        self.model = open_model(FOLDER, {**parameters, "ordinal": ordinal})
        self.outbox = Outbox(self.model.engine.guests)
        self.compiling = ThreadPoolExecutor(1, "structures")
        self.model.engine.start()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        """Passes requests to the engine; one that is wrong gets an error."""
        guests = self.model.engine.guests
        guests.enter()
        try:
            for request in requests:
                self._take(request)
        finally:
            guests.leave()

    def _take(self, request: pb_utils.InferenceRequest) -> None:
        client = _Client(request.get_response_sender(), self.outbox.lane())
        with _refusing(client):
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            prompt = read(inputs, self.model.limits, self.model.tokenizer)
            if prompt.wanted is None:
                self._submit(prompt, client)
            else:
                self.compiling.submit(self._submit_structured, prompt, client)

    def _submit_structured(self, prompt: Request, client: _Client) -> None:
        with _refusing(client):
            self._submit(prompt, client)

    def _submit(self, prompt: Request, client: _Client) -> None:
        self.model.engine.submit(self.model.answer(prompt, client))

    def finalize(self) -> None:
        """Ends the threads, after the finished answers are sent."""
        self.compiling.shutdown()
        self.model.engine.close()
        self.outbox.close()


@contextmanager
def _refusing(client: _Client) -> Iterator[None]:
    """Sends the client an error that is raised inside: a failed request must not stop the others."""
    try:
        yield
    except Refused as error:
        client.refuse(str(error), error.code)
    except Exception as error:
        client.refuse(f"{type(error).__name__}: {in_a_line(error)}", FAILED)


class _Client:
    """Sends the responses to one request. A client that cannot be reached is gone; the server's log says why."""

    def __init__(self, sender: pb_utils.InferenceResponseSender, outbox: Lane) -> None:
        self._sender, self._outbox = sender, outbox
        self._gone = self._queried = self._ended = False

    @property
    def gone(self) -> bool:
        """Whether the client has cancelled the request, or a response could not be sent. Also starts the next query of the server."""
        if not self._queried:
            self._queried = True
            self._outbox.put(self._ask)
        return self._gone

    def send(self, outputs: Outputs, *, last: bool) -> None:
        """Sends a response."""
        self._outbox.put(lambda: self._send(lambda: self._response(outputs), last=last))

    def refuse(self, line: str, code: str) -> None:
        """Sends an error, the last response."""
        self._outbox.put(lambda: self._send(lambda: self._error(line, code), last=True))

    def _ask(self) -> None:
        """Asks the server whether the client has cancelled. After its last response a request no longer exists."""
        try:
            self._gone = self._gone or (not self._ended and bool(self._sender.is_cancelled()))
        except Exception as error:
            self._lose(error)
        self._queried = False

    def _send(self, make: Callable[[], pb_utils.InferenceResponse], *, last: bool) -> None:
        self._ended = last
        try:
            self._sender.send(make(), **({"flags": pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL} if last else {}))
        except Exception as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self._gone = True
        pb_utils.Logger.log_warn(f"a response could not be sent: {in_a_line(error)}")

    @staticmethod
    def _response(outputs: Outputs) -> pb_utils.InferenceResponse:
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in tensors(outputs).items()])

    @staticmethod
    def _error(line: str, code: str) -> pb_utils.InferenceResponse:
        line = " ".join(f"{MODEL_FAILED if code == FAILED else ''}{line}".split())[:500]
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(line, getattr(pb_utils.TritonError, code)))
