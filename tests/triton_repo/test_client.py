"""The client, with a stand-in for the connection: a model that answers the length of the text."""

import threading
import time

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from triton_repo import client

ROWS = [f"{'x' * (index % 7)}{index}" for index in range(60)]


class Result:
    def __init__(self, row: bytes):
        size = float(len(row))
        self.arrays = {
            "LOGITS": np.array([[size, -size]], np.float32),
            "LABEL": np.array([[row.decode()]], np.object_),
            "SCORE": np.array([[size]], np.float32),
        }

    def as_numpy(self, name):
        return self.arrays.get(name)  # as the real one: None for an output that there is not


class Connection:
    now, most, asked, refused = 0, 0, 0, None
    lock = threading.Lock()

    def __init__(self, address):
        assert address == "127.0.0.1:1"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def infer(self, model, inputs, client_timeout):
        with Connection.lock:
            Connection.now, Connection.asked = Connection.now + 1, Connection.asked + 1
            Connection.most = max(Connection.most, Connection.now)
        time.sleep(0.002)
        with Connection.lock:
            Connection.now -= 1
        row = inputs[0]._get_content()[4:]
        if row.decode() == Connection.refused:
            raise InferenceServerException("not\nthis one")
        return Result(row)


@pytest.fixture(autouse=True)
def connection(monkeypatch):
    monkeypatch.setattr(tritonclient.grpc, "InferenceServerClient", Connection)
    Connection.now = Connection.most = Connection.asked = 0
    Connection.refused = None
    return Connection


@pytest.mark.parametrize("concurrency", [1, 5, 100])
def test_answers_come_in_the_order_of_the_rows(concurrency):
    told = []
    answers = client.evaluate("127.0.0.1:1", "m", ROWS, concurrency, told.append)
    assert answers.outputs["LABEL"][:, 0].tolist() == ROWS
    assert answers.logits.tolist() == [[len(row), -len(row)] for row in ROWS]
    assert answers.outputs["SCORE"][:, 0].tolist() == [len(row) for row in ROWS]
    assert answers.logits.dtype == answers.outputs["SCORE"].dtype == np.float32
    assert sum(told) == len(ROWS)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_no_more_requests_than_asked_for_are_under_way(connection, concurrency):
    client.evaluate("127.0.0.1:1", "m", ROWS, concurrency)
    assert connection.most <= concurrency
    assert connection.asked == len(ROWS)


def test_a_refused_row_is_named_and_ends_it(connection):
    connection.refused = ROWS[3]
    with pytest.raises(client.RequestError, match=r"^row 3 of 60: model m: the request failed: not this one$"):
        client.evaluate("127.0.0.1:1", "m", ROWS, 2)
    assert connection.asked < 10


def test_latency_counts_what_it_measured(connection):
    row = client.latency("127.0.0.1:1", "m", ROWS, 4, requests=210, seconds=60, warm_up=2)
    assert (row.concurrency, row.n, connection.asked) == (4, 210, 218)
    assert 0 < row.p50_ms <= row.p90_ms <= row.p99_ms
    assert row.throughput_per_s > 0


def test_p99_needs_samples():
    assert client.latency("127.0.0.1:1", "m", ROWS, 1, requests=199, warm_up=0).p99_ms is None


def test_a_request_with_several_rows_is_timed_whole(connection):
    row = client.batch_latency("127.0.0.1:1", "m", ROWS[:3], requests=205, seconds=60, warm_up=5)
    assert (row.n, connection.asked) == (205, 210)
    assert 0 < row.p50_ms <= row.p90_ms <= row.p99_ms
    assert 0 <= row.waited < 1
    assert client.batch_latency("127.0.0.1:1", "m", ROWS[:3], requests=10**6, seconds=0.02, warm_up=0).n >= 1
    connection.refused = ROWS[0]
    with pytest.raises(client.RequestError, match="not this one"):
        client.batch_latency("127.0.0.1:1", "m", ROWS[:1])


def test_latency_stops_in_time(connection):
    row = client.latency("127.0.0.1:1", "m", ROWS, 2, requests=10**6, seconds=0.05, warm_up=0)
    assert 1 <= row.n == connection.asked < 10**6


@pytest.mark.parametrize(
    ("row", "names", "content"),
    [
        ("n\u00e4h", ["TEXT"], b"\x04\x00\x00\x00n\xc3\xa4h"),
        ("", ["TEXT"], b"\x00\x00\x00\x00"),
        (("a", "b"), ["TEXT", "TEXT_PAIR"], b"\x01\x00\x00\x00a"),
        (b"\x89PNG\x00", ["IMAGE"], b"\x05\x00\x00\x00\x89PNG\x00"),
    ],
)
def test_inputs(row, names, content):
    tensors = client.inputs(row)
    assert [tensor.name() for tensor in tensors] == names
    assert {(tensor.datatype(), tuple(tensor.shape())) for tensor in tensors} == {("BYTES", (1, 1))}
    assert tensors[0]._get_content() == content
