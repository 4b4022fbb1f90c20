"""Streams of gRPC through the front, before a stand-in for the call to Triton."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from triton_repo.front import routes as module
from triton_repo.front import streams
from triton_repo.front.admission import Admission
from triton_repo.front.inference import Inference
from triton_repo.front.limits import RESTARTING, Load
from triton_repo.front.routes import Routes
from triton_repo.front.streams import Streams


class Aborted(Exception):
    """What `abort` raises."""


class Context:
    """Keeps what the client is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.aborted: tuple[Any, str] | None = None

    async def write(self, body: bytes) -> None:
        self.sent.append(pb.ModelStreamInferResponse.FromString(body))

    async def abort(self, code: Any, line: str) -> None:
        self.aborted = (code, line)
        raise Aborted


class Call:
    """A call to Triton that answers each request with one response; `ends` is how it ends after so many.

    A response takes `seconds`, and is an error if there is a `line`.
    """

    def __init__(self, ends: BaseException | None, after: int, seconds: float = 0.0, line: str = "") -> None:
        self._ends, self._left, self.asked = ends, after, asyncio.Queue[Any]()
        self._seconds, self._line = seconds, line
        self.cancelled = False

    async def write(self, request: Any) -> None:
        if not self._left:
            raise asyncio.InvalidStateError("the call is over")  # as grpc.aio does
        self._left -= 1
        await self.asked.put(request)

    async def done_writing(self) -> None:
        await self.asked.put(None)

    async def read(self) -> Any:
        if not self._left and self.asked.empty():
            await asyncio.sleep(0.02)  # the end is known later here than to `write`
            if self._ends is not None:
                raise self._ends
        request = await self.asked.get()
        if request is None:
            return grpc.aio.EOF
        await asyncio.sleep(self._seconds)
        response = pb.ModelStreamInferResponse(error_message=self._line)
        response.infer_response.id = request.id
        response.infer_response.parameters["triton_final_response"].bool_param = True
        return response

    def cancel(self) -> None:
        self.cancelled = True


def forward(call: Call, requests: int, admission: Admission | None = None, routes: Routes | None = None) -> tuple[Context, Load]:
    asked = pb.ModelInferRequest(model_name="m", id="mine")
    asked.inputs.add(name="X", datatype="INT32", shape=[1])
    asked.raw_input_contents.append(b"\0" * 4)

    async def bodies() -> AsyncIterator[bytes]:
        for _ in range(requests):
            yield asked.SerializeToString()
            await asyncio.sleep(0)

    class Channel:
        def stream_stream(self, *_: Any) -> Any:
            return lambda metadata: call

    context, load = Context(), Load()
    infer = Inference(SimpleNamespace(unary_unary=lambda *_: None), routes or Routes(), admission or Admission())

    async def run() -> None:
        with suppress(Aborted):
            await Streams(Channel(), load, infer).forward(bodies(), context)

    asyncio.run(run())
    assert call.cancelled
    assert load.held == 0
    return context, load


def test_responses_have_the_id_of_the_client() -> None:
    context, _ = forward(Call(None, 5), 3)
    assert [one.infer_response.id for one in context.sent] == ["mine"] * 3
    assert context.aborted is None


@pytest.mark.parametrize(("code", "line"), [(grpc.StatusCode.UNAVAILABLE, RESTARTING), (grpc.StatusCode.INTERNAL, "as Triton says")])
def test_a_stream_that_triton_breaks_off_ends_as_triton_says(code: grpc.StatusCode, line: str) -> None:
    """Requests that come after the end must not hide how it ended."""
    broken = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="as Triton says")
    context, _ = forward(Call(broken, 2), 5)
    assert len(context.sent) == 2
    assert context.aborted == (code, line)


def routes(folder: Path, **route: Any) -> Routes:
    (folder / "routes").write_text(json.dumps({"m": {"version": "1", **route}}))
    return Routes(str(folder / "routes"))


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (module, streams):
        monkeypatch.setattr(place, "STREAM_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(streams, "LOOK_SECONDS", 0.01)


@pytest.mark.usefixtures("short_times")
def test_a_model_may_be_silent_as_long_as_it_may_answer(tmp_path: Path) -> None:
    context, _ = forward(Call(None, 2, seconds=0.3), 1, routes=routes(tmp_path, request_seconds=60.0))
    assert [one.infer_response.id for one in context.sent] == ["mine"]
    assert context.aborted is None


@pytest.mark.usefixtures("short_times")
def test_a_model_that_is_silent_for_longer_has_failed(tmp_path: Path) -> None:
    admission = Admission()
    context, _ = forward(Call(None, 2, seconds=60.0), 1, admission, routes(tmp_path, request_seconds=0.01))
    assert context.sent == []
    assert context.aborted is not None
    assert context.aborted[0] == grpc.StatusCode.DEADLINE_EXCEEDED
    assert admission.flows["m"].ended == {"timed_out": 1}


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("", "answered"),
        ("8 requests are being answered and 64 wait, the most allowed; try again later", "refused"),
        ("[request id: <id_unknown>] Exceeds maximum queue size", "refused"),
        ("[request id: <id_unknown>] Request timeout expired", "timed_out"),
        ("TOP_K given without TEMPERATURE", "failed"),
    ],
)
def test_requests_of_a_stream_are_counted_by_outcome(line: str, outcome: str, tmp_path: Path) -> None:
    admission = Admission()
    forward(Call(None, 4, line=line), 3, admission, routes(tmp_path, request_seconds=60.0))
    assert admission.flows["m"].ended == Counter({outcome: 3})
    assert admission.flows["m"].requests == 0


def test_a_stream_keeps_the_limits_of_a_queue(tmp_path: Path) -> None:
    admission = Admission()
    context, _ = forward(Call(None, 9, seconds=0.02), 8, admission, routes(tmp_path, max_requests=2))
    refused = [one for one in context.sent if "2 requests are under way, the most allowed" in one.error_message]
    assert len(refused) == 6
    assert admission.flows["m"].ended == {"refused": 6, "answered": 2}


def test_an_old_stream_ends_once_nothing_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STREAM_SECONDS", 0.0)
    monkeypatch.setattr(streams, "LOOK_SECONDS", 0.01)
    context, _ = forward(Call(None, 9), 1, routes=routes(tmp_path))
    assert all("open another" in one.error_message for one in context.sent)
    assert context.aborted is not None
    assert "open another" in context.aborted[1]
