"""Who has come, who is gone, and which process reports it."""

from __future__ import annotations

import itertools
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.machine import lifeline
from foundation.machine.faults import FailedElsewhere, Fault
from foundation.machine.lifeline import KEY, WATCHED, Gauge, Lifeline, Peer, join, named, ranges

HOST = socket.gethostname()
WAIT_S = 60.0
"""Most seconds that a test waits for what should happen at once."""


class Store:
    """The store of a process group, in one process."""

    def __init__(self) -> None:
        self.values: dict[str, Future[str]] = {}
        self.lock = threading.Lock()

    def _of(self, key: str) -> Future[str]:
        with self.lock:
            return self.values.setdefault(key, Future())

    def set(self, key: str, value: str) -> None:
        self._of(key).set_result(value)

    def get(self, key: str) -> bytes:
        return self._of(key).result(WAIT_S).encode()


class Run:
    """Processes of a run, as threads of this one; `told` gets the line with which each one is ended, by rank."""

    def __init__(self, size: int, stack: ExitStack) -> None:
        self.size, self.store, self.stack = size, Store(), stack
        self.told: dict[int, queue.SimpleQueue[str | None]] = {rank: queue.SimpleQueue() for rank in range(size)}
        self.pool = stack.enter_context(ThreadPoolExecutor(size))

    def coming(self, rank: int) -> Future[Lifeline]:
        return self.pool.submit(join, self.store, rank, self.size, "127.0.0.1", self.told[rank].put)

    def all(self, *but: int) -> dict[int, Lifeline]:
        """Returns the lines of all processes but some, which come as raw connections."""
        coming = {rank: self.coming(rank) for rank in range(self.size) if rank not in but}
        self.raw = {rank: self.pool.submit(lifeline._first, self.store, Peer(rank, HOST), "127.0.0.1") for rank in but}
        made = {rank: future.result(WAIT_S) for rank, future in coming.items()}
        for one in made.values():
            self.stack.callback(one.close)
        return made

    def cut(self, rank: int) -> None:
        """Closes the connection of a process, as the kernel does when it is ended."""
        self.raw[rank].result(WAIT_S).socket.close()

    def ended(self, rank: int) -> str | None:
        """Returns the line with which a process was ended."""
        return self.told[rank].get(timeout=WAIT_S)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Run]]:
    monkeypatch.delenv(WATCHED, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(lifeline, "GRACE_S", 0.05)
    monkeypatch.setattr(lifeline, "SETTLE_S", 0.2)
    with ExitStack() as stack:
        yield lambda size: Run(size, stack)


def test_who_does_its_work_is_not_missed(runs: Callable[[int], Run]) -> None:
    run = runs(3)
    lines = run.all()
    for rank in (1, 2):
        lines[rank].close()
    assert lines[0].why(3 * lifeline.SETTLE_S) is None
    lines[0].close()
    assert all(told.empty() for told in run.told.values())


def test_those_that_did_not_come_are_named(runs: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "JOIN_S", 0.5)
    run = runs(5)
    first, second, fourth = run.coming(0), run.coming(1), run.coming(3)
    with pytest.raises(Fault, match=rf"3 of 5 processes .*0.5 s.* 0-1, 3 on {HOST}; 2, 4 did not"):
        first.result(WAIT_S)
    for other in (second, fourth):
        with pytest.raises(FailedElsewhere):
            other.result(WAIT_S)


def test_a_first_process_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty(Store):
        def get(self, key: str) -> bytes:
            raise RuntimeError("wait timeout after 600000ms")

    with pytest.raises(Fault, match=r"process 0 at node-a .*did not come"):
        join(Empty(), 1, 2, "node-a")


def test_a_first_process_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "RETRY_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(lifeline, "JOIN_S", 0.05)
    with pytest.raises(Fault, match=rf"process 0 did not come to 127\.0\.0\.1:{port} within 0\.05 s \(Connection refused\)"):
        lifeline.wait_for_first("127.0.0.1", port)
    monkeypatch.setattr(lifeline, "JOIN_S", WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lifeline.wait_for_first, "127.0.0.1", port)
        time.sleep(0.03)
        assert not waits.done()
        with socket.create_server(("127.0.0.1", port)):
            waits.result(WAIT_S)


def test_a_first_process_behind_a_closed_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store.set(KEY, json.dumps({"port": port, "word": "x", "host": "node-a"}))
    with pytest.raises(Fault, match=rf"process 1 on {HOST} cannot reach process 0 at 127\.0\.0\.1:{port}.*ports"):
        join(store, 1, 2, "127.0.0.1")


def test_a_process_that_is_gone_is_named_once(runs: Callable[[int], Run]) -> None:
    run = runs(4)
    run.all(1)
    run.cut(1)
    line = run.ended(0)
    assert line is not None
    assert line.startswith(f"process 1 on {HOST} is gone")
    assert "\n" not in line
    assert run.ended(2) is None
    assert run.ended(3) is None


def test_processes_of_a_machine_are_named_together(runs: Callable[[int], Run]) -> None:
    run = runs(4)
    run.all(1, 2)
    run.cut(2)
    run.cut(1)
    assert (run.ended(0) or "").startswith(f"processes 1-2 on {HOST} are gone")
    assert run.ended(3) is None


@pytest.mark.parametrize(("local", "watched", "tells"), [("0", False, True), ("1", False, False), ("0", True, False)])
def test_without_the_first_process_one_on_each_machine_reports(
    local: str, watched: bool, tells: bool, runs: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local)
    if watched:
        monkeypatch.setenv(WATCHED, "1")
    run = runs(2)
    connection = run.pool.submit(lifeline._all_others, run.store, Peer(0, HOST), 2)
    second = run.coming(1).result(WAIT_S)
    run.stack.callback(second.close)
    connection.result(WAIT_S)[0].socket.close()
    line = run.ended(1)
    assert (line is not None) == tells
    assert line is None or line.startswith(f"process 0 on {HOST} is gone")


def test_who_fails_reports_it_alone(runs: Callable[[int], Run]) -> None:
    run = runs(3)
    lines = run.all()
    lines[2].failed()
    lines[2].close()
    assert run.ended(0) is None
    assert run.ended(1) is None
    assert run.told[2].empty()


def test_a_main_thread_that_notices_ends_by_itself(runs: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "GRACE_S", WAIT_S)
    run = runs(2)
    first = run.all(1)[0]
    assert first.why(0.0) is None
    run.cut(1)
    end = first.why()
    assert end is not None
    assert f"process 1 on {HOST}" in (end.line or "")
    first.close()
    assert run.told[0].empty()


def test_who_came_and_was_ended_is_missing(runs: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "JOIN_S", 1.0)
    run = runs(3)
    first = run.coming(0)
    found = json.loads(run.store.get(KEY))
    with socket.create_connection(("127.0.0.1", found["port"])) as early:
        early.sendall(f"{found['word']} 1 gone\n".encode())
        time.sleep(0.1)
    second = run.coming(2)
    with pytest.raises(Fault, match=r"2 of 3 processes .*; 1 did not"):
        first.result(WAIT_S)
    with pytest.raises(FailedElsewhere):
        second.result(WAIT_S)


def test_strangers_and_those_that_come_twice_are_no_hindrance(runs: Callable[[int], Run]) -> None:
    run = runs(3)
    first = run.coming(0)
    found = json.loads(run.store.get(KEY))
    strangers = [socket.create_connection(("127.0.0.1", found["port"])) for _ in range(6)]
    for stranger, text in zip(strangers, (b"GET / HTTP/1.1\r\n\r\n", b"x 1 me\n", b"\n", b"y" * 5000, b"", b"\xff\xfe\n"), strict=True):
        stranger.sendall(text)
    word = found["word"].encode()
    for text in (b"x 1 me\n", word + b" 3 me\n", word + b" 0 me\n", word + b" one me\n"):  # of no process that is missing
        wrong = socket.create_connection(("127.0.0.1", found["port"]))
        wrong.sendall(text)
        assert wrong.recv(10) == b""
        wrong.close()
    early = socket.create_connection(("127.0.0.1", found["port"]))
    early.sendall(word + b" 1 gone\n")
    time.sleep(0.05)
    early.close()  # it was ended, and is started again
    lines = [first, run.coming(1), run.coming(2)]
    for line in lines:
        run.stack.callback(line.result(WAIT_S).close)
    assert [one.peer for one in first.result()._connections] == [Peer(1, HOST), Peer(2, HOST)]
    for stranger in strangers:
        stranger.close()


def test_the_kernel_gives_a_connection_up_in_time(runs: Callable[[int], Run]) -> None:
    lines = runs(2).all()
    for line in lines.values():
        option = line._connections[0].socket.getsockopt
        assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, between, probes = (
            option(socket.IPPROTO_TCP, name) for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert 0 < idle + between * probes <= lifeline.LOST_S
        assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == lifeline.LOST_S * 1000


def test_the_first_process_gets_the_numbers_of_all(runs: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "PULSE_S", 0.02)
    lines, judged = runs(3).all(), queue.SimpleQueue[dict[int, Any]]()
    lines[0].gauge = Gauge(tuple, lambda found: judged.put({peer.rank: one.values for peer, one in found.items()}))
    assert judged.get(timeout=WAIT_S) == {0: (), 1: (), 2: ()}  # the others have not begun
    for rank, line in lines.items():
        line.gauge = Gauge(
            lambda rank=rank: (rank, 0.1 + rank), lambda found: judged.put({peer.rank: one.values for peer, one in found.items()})
        )  # type: ignore[misc]
    expected = {rank: (rank, 0.1 + rank) for rank in range(3)}
    while judged.get(timeout=WAIT_S) != expected:
        pass
    for line in lines.values():
        line.gauge = None


@given(st.sets(st.integers(0, 40)))
def test_ranges_name_each_number_once(numbers: set[int]) -> None:
    text = ranges(sorted(numbers))
    found = []
    for part in filter(None, text.split(", ")):
        first, _, last = part.partition("-")
        found += list(range(int(first), int(last or first) + 1))
    assert found == sorted(numbers)
    parts = [part.partition("-") for part in filter(None, text.split(", "))]
    assert all(int(after[0]) > int(before[2] or before[0]) + 1 for before, after in itertools.pairwise(parts))


def test_processes_are_named_with_their_machines() -> None:
    assert named([Peer(3, "b")]) == "process 3 on b"
    assert named([Peer(5, "c"), Peer(4, "b"), Peer(3, "b")]) == "processes 3-4 on b, 5 on c"
