"""The real server, on tiny models: hostile requests, heavy load, sudden deaths. Needs the server environment."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from tritonclient import grpc, http
from tritonclient.utils import InferenceServerException

from foundation.core.target import Target
from foundation.labels.classes import ClassIds
from foundation.stage.context import Context
from tests.told import Told
from tests.triton_repo import tiny_exports as tiny
from triton_repo import client, environment, layout, server, service
from triton_repo.triton_repo import TritonRepo

pytestmark = pytest.mark.slow
ROOT = Path(environment.__file__).parents[1]
TEXT, IMAGE, PAIR = "text-fp32", "image-fp32", "pair-fp32"


def regions(pid: int) -> set[str]:
    """Shared memory of the servers that a process started."""
    return {path.name for path in Path("/dev/shm").glob(f"compress-triton-{pid}-*")}


def write(root: Path, name: str, prepared, rows, **settings) -> None:
    exported = tiny.export(root / name, prepared, rows, ((name, "fp32"),))
    layout.write_repository(root / "repository", layout.served_models(exported), pairs=name == "pair", batch_sizes=(1, 8), **settings)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile") / "a $(touch PWNED) gr\u00f6\u00dfe"
    root.mkdir()
    write(root, "text", tiny.text_preprocessor(), tiny.TEXTS)
    write(root, "pair", tiny.text_preprocessor(), tiny.PAIRS)
    write(root, "image", tiny.image_preprocessor(), tiny.IMAGES)
    with service.Service(root / "repository", environment.check(), root / "log") as started:
        yield started
        assert started.deaths == 0
    assert not list(root.parents[1].rglob("PWNED"))


@pytest.fixture
def connection(running):
    with grpc.InferenceServerClient(running.grpc_address) as opened:
        yield opened


@pytest.fixture(autouse=True)
def still_right(running):
    """Whatever a test did, the server answers rightly afterwards."""
    yield
    prepared = tiny.text_preprocessor()
    answers = client.evaluate(running.grpc_address, TEXT, tiny.TEXTS)
    np.testing.assert_array_equal(answers.logits, tiny.expected(prepared, tiny.TEXTS))


def tensor(name: str, values, datatype: str = "BYTES"):
    array = np.array(values, dtype=np.object_ if datatype == "BYTES" else None)
    made = grpc.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def refused(connection, model: str, *tensors) -> str:
    with pytest.raises(InferenceServerException) as caught:
        connection.infer(model, list(tensors), client_timeout=60)
    return caught.value.message()


def test_pairs_and_images(running):
    prepared = tiny.text_preprocessor()
    np.testing.assert_array_equal(client.evaluate(running.grpc_address, PAIR, tiny.PAIRS).logits, tiny.expected(prepared, tiny.PAIRS))
    prepared = tiny.image_preprocessor()
    np.testing.assert_allclose(
        client.evaluate(running.grpc_address, IMAGE, tiny.IMAGES).logits, tiny.expected(prepared, tiny.IMAGES), rtol=1e-6
    )


def test_many_rows_in_one_request(connection):
    result = connection.infer(TEXT, [tensor("TEXT", [[text.encode()] for text in tiny.TEXTS])])
    np.testing.assert_array_equal(result.as_numpy("LOGITS"), tiny.expected(tiny.text_preprocessor(), tiny.TEXTS))
    assert result.as_numpy("LABEL").shape == result.as_numpy("SCORE").shape == (len(tiny.TEXTS), 1)


@pytest.mark.parametrize("datatype", ["FP32", "INT64", "UINT8"])
def test_wrong_types(connection, datatype):
    values = np.ones((1, 1), {"FP32": np.float32, "INT64": np.int64, "UINT8": np.uint8}[datatype])
    made = grpc.InferInput("TEXT", [1, 1], datatype)
    made.set_data_from_numpy(values)
    assert "unexpected" in refused(connection, TEXT, made) or "data-type" in refused(connection, TEXT, made)


@pytest.mark.parametrize("shape", [(1,), (1, 2), (1, 1, 1), (0, 1), (9, 1)])
def test_wrong_shapes(connection, shape):
    assert refused(connection, TEXT, tensor("TEXT", np.full(shape, b"a", dtype=np.object_)))


def test_wrong_inputs(connection):
    assert refused(connection, TEXT, tensor("TEXTS", [[b"a"]]))
    assert refused(connection, TEXT)
    assert refused(connection, PAIR, tensor("TEXT", [[b"a"]]))
    assert refused(connection, PAIR, tensor("TEXT", [[b"a"], [b"b"]]), tensor("TEXT_PAIR", [[b"a"]]))
    assert refused(connection, "no-such-model", tensor("TEXT", [[b"a"]]))


def test_lengths_that_lie(connection):
    made = grpc.InferInput("TEXT", [1, 1], "BYTES")
    made.set_data_from_numpy(np.array([[b"abcdefgh"]], dtype=np.object_))
    made._raw_content = b"\xff\xff\xff\x7fabcdefgh"
    assert refused(connection, TEXT, made)


@pytest.mark.parametrize("text", [b"", b" ", b"\x00", b"\n" * 10, "\U0001f600 \u202e".encode(), b"a" * 2**16, b"fine " * 200_000])
def test_strange_texts_are_answered(connection, text):
    result = connection.infer(TEXT, [tensor("TEXT", [[text]])], client_timeout=60)
    assert np.isfinite(result.as_numpy("LOGITS")).all()


def test_a_long_text_that_cannot_be_cut_is_refused(connection):
    assert "cannot be cut between two words" in refused(connection, TEXT, tensor("TEXT", [[b"a" * 2**20]]))


@pytest.mark.parametrize("text", [b"\xff\xfe", b"ok \xc3", b"\xed\xa0\x80"])
def test_texts_that_are_no_utf8(connection, text):
    assert "row 1: not UTF-8 text" in refused(connection, TEXT, tensor("TEXT", [[b"fine"], [text]]))


@pytest.mark.parametrize("image", [b"", b"no image", tiny.IMAGES[0][:-30], b"\x89PNG\r\n\x1a\n" + b"\x00" * 100, b"\xff" * 2**20])
def test_broken_images(connection, image):
    assert "not a readable image" in refused(connection, IMAGE, tensor("IMAGE", [[image]]))


def test_bad_rows_among_good_ones_under_load(running):
    """500 requests at once, every fifth one bad: each gets the answer that it would get alone."""
    prepared, done, outcomes = tiny.text_preprocessor(), threading.Semaphore(0), {}
    wanted = tiny.expected(prepared, tiny.TEXTS)
    with grpc.InferenceServerClient(running.grpc_address) as opened:
        for index in range(500):
            text = b"\xff" if index % 5 == 0 else tiny.TEXTS[index % len(tiny.TEXTS)].encode()

            def note(result, error, index=index):
                outcomes[index] = (result, error)
                done.release()

            opened.async_infer(TEXT, [tensor("TEXT", [[text]])], note, client_timeout=120)
        assert all(done.acquire(timeout=120) for _ in range(500))
    for index, (result, error) in outcomes.items():
        if index % 5 == 0:
            assert "row 0: not UTF-8 text" in error.message()
        else:
            np.testing.assert_array_equal(result.as_numpy("LOGITS")[0], wanted[index % len(tiny.TEXTS)])


def test_a_thousand_requests_at_once(running):
    wanted, done, outcomes = tiny.expected(tiny.text_preprocessor(), tiny.TEXTS), threading.Semaphore(0), {}
    with grpc.InferenceServerClient(running.grpc_address) as opened:
        for index in range(1000):

            def note(result, error, index=index):
                outcomes[index] = result if error is None else error
                done.release()

            opened.async_infer(TEXT, client.inputs(tiny.TEXTS[index % len(tiny.TEXTS)]), note, client_timeout=120)
        assert all(done.acquire(timeout=120) for _ in range(1000))
    for index, result in outcomes.items():
        np.testing.assert_array_equal(result.as_numpy("LOGITS")[0], wanted[index % len(tiny.TEXTS)])


def test_big_texts_at_once(running):
    """Eight texts of a megabyte under way: more than the shared memory that the backend starts with."""
    rows = [f"fine {'a ' * 500_000}", "dull"] * 8
    answers = client.evaluate(running.grpc_address, TEXT, rows, 8)
    np.testing.assert_array_equal(answers.logits, np.tile(answers.logits[:2], (8, 1)))


def test_http_and_metrics(running):
    wanted = tiny.expected(tiny.text_preprocessor(), ["dull"])
    with http.InferenceServerClient(running.http_address) as opened:
        for binary in (True, False):
            made = http.InferInput("TEXT", [1, 1], "BYTES")
            made.set_data_from_numpy(np.array([[b"dull" if binary else "dull"]], dtype=np.object_), binary_data=binary)
            outputs = [http.InferRequestedOutput(name, binary_data=binary) for name in ("LOGITS", "LABEL")]
            answer = opened.infer(TEXT, [made], outputs=outputs)
            np.testing.assert_allclose(answer.as_numpy("LOGITS"), wanted, rtol=1e-6)
            assert answer.as_numpy("LABEL").shape == (1, 1)
        np.testing.assert_array_equal(opened.infer(TEXT, [made]).as_numpy("LOGITS"), wanted)
        assert opened.is_server_live()
        assert opened.is_server_ready()
        assert opened.is_model_ready(TEXT)
        assert opened.get_server_metadata()["name"] == "triton"
        assert opened.get_model_metadata(TEXT)["inputs"] == [{"name": "TEXT", "datatype": "BYTES", "shape": [-1, 1]}]
    with urllib.request.urlopen(f"http://{running.metrics_address}/metrics") as answer:
        assert b"nv_inference_request_success" in answer.read()


def test_what_is_not_for_clients_is_refused(running, connection):
    calls = [
        lambda one: one.load_model(TEXT),
        lambda one: one.unload_model(TEXT),
        lambda one: one.register_system_shared_memory("r", "/r", 64),
        lambda one: one.register_cuda_shared_memory("r", b"eHh4", 0, 64),
        lambda one: one.unregister_system_shared_memory(),
        lambda one: one.unregister_cuda_shared_memory(),
        lambda one: one.get_system_shared_memory_status(),
        lambda one: one.get_cuda_shared_memory_status(),
        lambda one: one.update_log_settings(settings={"log_verbose_level": 9}),
        lambda one: one.get_log_settings(),
        lambda one: one.update_trace_settings(settings={"trace_level": "TENSORS", "trace_file": "/tmp/x"}),
        lambda one: one.get_trace_settings(),
        lambda one: one.get_inference_statistics(),
        lambda one: one.get_model_config(TEXT),
    ]
    with http.InferenceServerClient(running.http_address) as opened:
        for one in (connection, opened):
            for call in calls:
                with pytest.raises(InferenceServerException, match=r"not offered here|unknown model: .stats"):
                    call(one)
    # a client that gets past the front does not know the key
    with grpc.InferenceServerClient(f"unix:{running._triton.grpc_socket}") as inside:
        for call in calls:
            with pytest.raises(InferenceServerException, match="triton-key"):
                call(inside)


def listening(process: subprocess.Popen) -> dict[tuple[str, int], str]:
    """Where a process and those below it listen, with their names."""
    found = {}
    for one in psutil.Process(process.pid).children(recursive=True):
        for socket in one.net_connections("tcp"):
            if socket.status == psutil.CONN_LISTEN:
                found[socket.laddr.ip.removeprefix("::ffff:"), socket.laddr.port] = one.name()
    return found


def test_only_the_front_listens_and_on_loopback_only(running):
    assert listening(running._triton._process) == {}
    ports = [int(address.rpartition(":")[2]) for address in (running.grpc_address, running.http_address, running.metrics_address)]
    assert set(listening(running._front)) == {("127.0.0.1", port) for port in ports}
    assert running._triton.grpc_socket.parent.stat().st_mode & 0o077 == 0


def test_a_model_that_does_not_load_is_named(tmp_path):
    write(tmp_path, "text", tiny.text_preprocessor(), tiny.TEXTS)
    (tmp_path / "repository" / TEXT / "1" / "openvino.xml").write_text("broken")
    with pytest.raises(server.ServerError, match=r"Triton exited: .*text-fp32"):
        server.TritonServer(tmp_path / "repository", environment.check(), tmp_path / "log").__enter__()


def test_stopping_leaves_nothing(tmp_path):
    write(tmp_path, "text", tiny.text_preprocessor(), tiny.TEXTS)
    before = regions(os.getpid())
    with server.TritonServer(tmp_path / "repository", environment.check(), tmp_path / "log") as started:
        assert regions(os.getpid()) > before
        watcher = started._process
        mine = psutil.Process(watcher.pid).children(recursive=True)
        assert any("stub" in child.name() for child in mine)
        assert len(client.evaluate(started.grpc_address, TEXT, tiny.TEXTS).logits) == len(tiny.TEXTS)
    assert regions(os.getpid()) == before
    assert not any(child.is_running() for child in mine)
    assert watcher.returncode is not None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["server.TritonServer", "service.Service"])
def test_the_server_dies_with_whoever_started_it(tmp_path, kind, number):
    write(tmp_path, "text", tiny.text_preprocessor(), tiny.TEXTS)
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # a longer path has no room for a socket
    script = (
        "import pathlib, time\nfrom triton_repo import environment, server, service\n"
        f"root = pathlib.Path({str(tmp_path)!r})\n"
        f"with {kind}(root / 'repository', environment.check(), root / 'log'):\n"
        "    print('ready', flush=True)\n    time.sleep(600)\n"
    )
    variables = {**os.environ, "TMPDIR": str(temporary)}
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT, env=variables)
    try:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"ready\n"
        below = psutil.Process(starter.pid).children(recursive=True)
        assert any("stub" in process.name() for process in below)
        assert regions(starter.pid)
        assert list(temporary.iterdir())
    finally:
        starter.send_signal(number)
        starter.wait()
    deadline = time.monotonic() + 5
    _, left = psutil.wait_procs(below, timeout=5)
    while (regions(starter.pid) or list(temporary.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    assert not regions(starter.pid)
    temporary.rmdir()  # nothing is left in it


def test_the_stage(tmp_path):
    """Two variants through the whole stage, answers equal to those of the engine."""

    prepared, rows = tiny.text_preprocessor(), tiny.TEXTS * 20
    exported = tiny.export(tmp_path / "export", prepared, rows, (("baseline", "fp32"), ("quantize", "int8")))
    data = SimpleNamespace(labels=(), evaluation=SimpleNamespace(rows=rows, labels=ClassIds(np.zeros(len(rows), np.int64))))
    context = Context("text-classification", data, 16, Target(threads=1), 0, Told(), tmp_path / "scratch")
    (tmp_path / "out").mkdir()
    stage = TritonRepo()
    assert stage.depends(context)["numpy"].startswith("1.")
    figures = stage.run(exported, context, tmp_path / "out")
    assert [(model["model"], model["disagreements"]) for model in figures["models"]] == [("baseline-fp32", 0), ("quantize-int8", 0)]
