"""/generate and /generate_stream of the front, before a stand-in for the channel to Triton: each failure has its status, and is counted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp.test_utils import TestClient, TestServer
from tritonclient.grpc import service_pb2 as pb

from triton_repo.front import routes as module
from triton_repo.front.admission import Admission
from triton_repo.front.figures import figures
from triton_repo.front.http_side import Paths
from triton_repo.front.inference import Inference
from triton_repo.front.limits import Load
from triton_repo.front.routes import Route, Routes

LANGUAGE, ROWS = {"request_seconds": 60.0}, {"max_requests": 2}


class Triton:
    """A channel to a model that answers with `code` and `line`, where it fails, after so many seconds."""

    def __init__(self, line: str = "", code: Any = grpc.StatusCode.OK, seconds: float = 0.0) -> None:
        self._line, self._code, self._seconds = line, code, seconds
        self.called: list[str] = []

    def unary_unary(self, method: str, *_: Any, **__: Any) -> Any:
        async def metadata(request: Any, timeout: float) -> Any:
            described = pb.ModelMetadataResponse(name=request.name)
            described.inputs.add(name="TEXT", datatype="BYTES", shape=[1])
            return described

        async def infer(request: Any, timeout: float, metadata: Any = None) -> bytes:
            self.called.append("infer")
            await asyncio.sleep(self._seconds)
            if self._line:
                raise grpc.aio.AioRpcError(self._code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=self._line)
            return answer().SerializeToString()  # type: ignore[no-any-return]

        return metadata if method.endswith("ModelMetadata") else infer

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        def call(requests: Any, timeout: float, metadata: Any = None) -> Any:
            self.called.append("stream")
            return Stream(pb.ModelStreamInferResponse(error_message=self._line, infer_response=answer()), self._seconds)

        return call


class Stream:
    """One response."""

    def __init__(self, message: Any, seconds: float) -> None:
        self._left, self._seconds = [message], seconds

    async def read(self) -> Any:
        await asyncio.sleep(self._seconds)
        return self._left.pop() if self._left else grpc.aio.EOF

    def cancel(self) -> None:
        self._left = []


def answer() -> Any:
    made = pb.ModelInferResponse(model_name="m")
    made.outputs.add(name="TEXT", datatype="BYTES", shape=[1])
    made.raw_output_contents.append(b"\2\0\0\0ab")
    return made


async def posts(triton: Triton, verb: str, folder: Path, route: dict[str, Any], count: int = 1) -> tuple[list[tuple[int, str]], str]:
    """Returns status and body of so many requests at once, and the metrics."""
    (folder / "routes").write_text(json.dumps({"m": {"version": "1", **route}}))
    routes, admission = Routes(str(folder / "routes")), Admission()
    paths = Paths(triton, Load(), Inference(triton, routes, admission))
    async with TestClient(TestServer(paths.application())) as client:

        async def one() -> tuple[int, str]:
            async with client.post(f"/v2/models/m/{verb}", data=json.dumps({"TEXT": "a"})) as response:
                return response.status, await response.text()

        found = await asyncio.gather(*(one() for _ in range(count)))
    return found, figures(admission, routes)


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("route", "triton", "status", "outcome"),
    [
        (LANGUAGE, Triton(), 200, "answered"),
        (LANGUAGE, Triton("TOP_K given without TEMPERATURE"), 400, "failed"),
        (LANGUAGE, Triton("the model failed: no memory"), 500, "failed"),
        (LANGUAGE, Triton("8 requests are being answered and 64 wait, the most allowed; try again later"), 503, "refused"),
        (ROWS, Triton(), 200, "answered"),
        (ROWS, Triton("row 0: not UTF-8 text (byte 3)", grpc.StatusCode.INVALID_ARGUMENT), 400, "failed"),
        (ROWS, Triton("no memory", grpc.StatusCode.INTERNAL), 500, "failed"),
        (ROWS, Triton("Exceeds maximum queue size", grpc.StatusCode.UNAVAILABLE), 503, "refused"),
        (ROWS, Triton("Request timeout expired", grpc.StatusCode.UNAVAILABLE), 504, "timed_out"),
        (ROWS, Triton("Request for unknown model: 'm' has no available versions", grpc.StatusCode.NOT_FOUND), 503, "refused"),
        (ROWS, Triton("Stub process 'm_0_0' is not healthy.", grpc.StatusCode.INTERNAL), 503, "refused"),
        (ROWS, Triton("Request for unknown model: 'm' is not found", grpc.StatusCode.NOT_FOUND), 404, "failed"),
    ],
)
def test_each_failure_has_its_status_and_is_counted(
    verb: str, route: dict[str, Any], triton: Triton, status: int, outcome: str, tmp_path: Path
) -> None:
    [(found, body)], metrics = asyncio.run(posts(triton, verb, tmp_path, route))
    assert found == status
    assert ("error" in body) == (status != 200)
    assert f'compress_front_requests_total{{model="m",outcome="{outcome}"}} 1' in metrics.splitlines()
    assert 'compress_front_under_way{model="m"} 0' in metrics.splitlines()
    assert set(triton.called) == {"stream" if route is LANGUAGE else "infer"}


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_a_full_queue_refuses_with_503_whatever_the_path(verb: str, tmp_path: Path) -> None:
    found, metrics = asyncio.run(posts(Triton(seconds=0.2), verb, tmp_path, ROWS, count=8))
    assert sorted(status for status, _ in found) == [200] * 2 + [503] * 6
    assert 'compress_front_requests_total{model="m",outcome="refused"} 6' in metrics.splitlines()


@pytest.mark.first(1)
@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize(("seconds", "status"), [(60.0, 200), (0.01, 504)])
def test_a_model_may_be_silent_as_long_as_it_may_answer(
    verb: str, seconds: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STREAM_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.05)
    [(found, _)], metrics = asyncio.run(posts(Triton(seconds=0.3), verb, tmp_path, {"request_seconds": seconds}))
    assert found == status
    assert f'outcome="{"answered" if status == 200 else "timed_out"}"}} 1' in metrics


@pytest.mark.parametrize("seconds", [None, 1.0, 600.0, 1e6])
def test_a_stream_outlasts_its_model(seconds: float | None) -> None:
    assert Route("1", request_seconds=seconds).silence_s > (seconds or 0.0)
