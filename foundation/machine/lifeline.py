"""The line from each process of a run to the first one: who has come, who is gone, and how fast each one is.

    process k  ---- a TCP connection ----  process 0

    coming   Process 0 counts for `JOIN_S` seconds. If some are missing, all that came end: nothing is written yet.
    gone     The kernel watches the connections. One of a process that was ended closes at once. One to a machine that is off, or behind a
             link that is cut, fails after `LOST_S` seconds: the kernel answers probes (keepalive, RFC 1122, 4.2.3.6) for a process that is
             busy or stopped, so that those are never taken for gone. A line names the processes; all others end.
    ending   Who ends by itself says so first: `done`, or `failed` after an error that it reports.
    pulses   Every `PULSE_S` seconds each process sends numbers (`foundation.training.processes.pace`). They cost no collective.

The main thread may wait within a collective that never returns: gloo has no timeout here, as process 0 may export for hours meanwhile, and
TCP alone waits for a machine that is off for as long as nothing is sent. So a thread watches. It lets the main thread end by the error that
a collective raises, and ends the process itself where none comes within `GRACE_S` seconds.

No clock of another machine is read, here or in anything that processes compare: durations are of the monotonic clock of one machine.

Left out: a link between two other processes that fails alone. Their collectives wait until TCP gives up (about 15 minutes).
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from foundation.machine.faults import FailedElsewhere, Fault

JOIN_S = 600.0
"""Seconds in which all processes have to come; torchrun waits as long for its nodes."""
LOST_S = 60
"""Seconds after which a machine that does not answer is gone."""
PROBES = 4
"""Probes of the kernel within `LOST_S`."""
GRACE_S = 5.0
"""Seconds that the main thread has to end by itself."""
SETTLE_S = 1.0
"""Seconds in which the other processes of a machine that is gone are noticed too: one line names all."""
PULSE_S = 10.0
RETRY_S = 0.5
"""Seconds between two tries to reach process 0."""
HELLO_BYTES = 1000
"""Most bytes of one message."""
KEY = "lifeline"
"""Where the store has the port of process 0."""
WATCHED = "COMPRESS_WATCHED"
"""Set in processes that `compress run --processes` has started and watches: it says itself which one was ended."""


class Store(Protocol):
    """The store of a process group, as far as it is used here."""

    def set(self, key: str, value: str) -> None:
        """Sets a value."""

    def get(self, key: str) -> bytes:
        """Returns a value; waits for it."""


@dataclass(frozen=True)
class Peer:
    """Another process."""

    rank: int
    host: str
    """Name of its machine."""


@dataclass
class _Connection:
    socket: socket.socket
    peer: Peer
    unread: bytes = b""
    ended: bool = False
    """Whether it has said that it ends."""


@dataclass(frozen=True)
class End:
    """Why this process has to end."""

    line: str | None
    """What it reports; None: another process reports it."""


@dataclass(frozen=True)
class Pulse:
    """The last numbers of a process."""

    at: float
    """When they came, by the clock of this machine, in seconds."""
    values: tuple[float, ...]
    """Empty before the first ones have come."""


@dataclass
class Gauge:
    """What pulses carry while it is set (`Lifeline.gauge`)."""

    read: Callable[[], Sequence[float]]
    """Returns the numbers of this process."""
    judge: Callable[[Mapping[Peer, Pulse]], None]
    """Gets the pulses of all processes, in process 0, after each of its own; must not raise."""


class Lifeline:
    """The lines of one process.

    Args:
        own: This process.
        connections: To all others in process 0, to process 0 in the others.
        ends: Ends the process at once, after it has reported a line, if there is one.
    """

    def __init__(self, own: Peer, connections: Iterable[_Connection], ends: Callable[[str | None], Any]) -> None:
        self.own = own
        self.gauge: Gauge | None = None
        self._connections, self._ends = list(connections), ends
        self._lost: list[Peer] = []
        self._silent = False
        self._known, self._left = threading.Event(), threading.Event()
        self._end = End(None)
        self._pulses: dict[Peer, Pulse] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for connection in self._connections:
            connection.socket.setblocking(False)
            _watch(connection.socket)
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._thread = threading.Thread(target=self._run, name="lifeline", daemon=True)
        self._thread.start()

    def why(self, seconds: float = GRACE_S) -> End | None:
        """Returns why this process has to end, if that is known within some seconds; it then has to end by itself."""
        if not self._known.wait(seconds):
            return None
        self._left.set()
        return self._end

    def failed(self) -> None:
        """Says that this process ends because of an error, which it reports."""
        self._tell("failed")

    def close(self) -> None:
        """Says that this process has done its work, unless it has failed; nothing is watched any longer."""
        self._tell("done")
        self._left.set()
        self._wake.close()
        self._thread.join()
        for connection in (self._woken, *(connection.socket for connection in self._connections)):
            connection.close()

    def _tell(self, message: str, but: _Connection | None = None) -> None:
        for connection in self._connections:
            if connection is not but:
                _send(connection.socket, message)

    def _run(self) -> None:
        """The thread."""
        pulse = time.monotonic()
        while not self._left.is_set():
            for key, _ in self._selector.select(max(0.0, pulse - time.monotonic())):
                if key.data is not None:
                    self._receive(key.data)
            if self._lost:
                self._take_leave(self._line())
            if self._silent:
                self._take_leave(None)
            if time.monotonic() >= pulse:
                pulse = time.monotonic() + PULSE_S
                self._beat()
        self._selector.close()

    def _beat(self) -> None:
        """Sends the numbers of this process; process 0 judges all of them."""
        gauge = self.gauge
        if gauge is None:
            self._pulses = {}
            return
        for connection in self._connections:  # who never sends anything is noticed too
            self._pulses.setdefault(connection.peer, Pulse(time.monotonic(), ()))
        values = tuple(gauge.read())
        if self.own.rank:
            self._tell("pulse " + " ".join(map(repr, values)))
            return
        self._pulses[self.own] = Pulse(time.monotonic(), values)
        gauge.judge(dict(self._pulses))

    def _receive(self, connection: _Connection) -> None:
        """Reads what a process has said, or notices that it is gone."""
        try:
            data = connection.socket.recv(4096)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # the kernel gave it up
            data = b""
        if not data:
            self._selector.unregister(connection.socket)
            if not connection.ended:
                self._lost.append(connection.peer)
            return
        *lines, connection.unread = (connection.unread + data).split(b"\n")
        for line in lines:
            word, *rest = line.decode("ascii", "replace").split()
            if word == "pulse":
                self._pulses[connection.peer] = Pulse(time.monotonic(), tuple(map(float, rest)))
            else:
                connection.ended = True
                self._silent |= word != "done"  # it failed, or process 0 has lost another one: that is reported there
                if word == "failed":
                    self._tell(word, but=connection)

    def _line(self) -> str | None:
        """Returns what this process reports of those that are lost, with the others on their machines; None if another one reports it."""
        deadline = time.monotonic() + SETTLE_S
        while (left := deadline - time.monotonic()) > 0 and not self._left.is_set():
            for key, _ in self._selector.select(left):
                if key.data is None:
                    break
                self._receive(key.data)
        if not self.own.rank:
            self._tell("lost")
        reports = self.own.rank == 0 or os.environ.get("LOCAL_RANK", "0") == "0"  # without process 0 one on each machine
        return lost_line(self._lost) if reports and WATCHED not in os.environ else None

    def _take_leave(self, line: str | None) -> None:
        """Lets the main thread end this process, or ends it."""
        self._end = End(line)
        self._known.set()
        if not self._left.wait(GRACE_S):
            self._ends(line)
        self._left.set()


def lost_line(lost: Sequence[Peer]) -> str:
    """Returns the message about processes that are gone."""
    verb = "is" if len(lost) == 1 else "are"
    return f"{named(lost)} {verb} gone: ended, or the machine or the network failed; run the same command to continue"


def named(peers: Iterable[Peer]) -> str:
    """Names processes and their machines: `process 3 on node-b`, `processes 4-7 on node-b, 9 on node-c`."""
    hosts: dict[str, list[int]] = {}
    for peer in sorted(peers, key=lambda peer: peer.rank):
        hosts.setdefault(peer.host, []).append(peer.rank)
    several = sum(map(len, hosts.values())) > 1
    return f"process{'es' * several} " + ", ".join(f"{ranges(ranks)} on {host}" for host, ranks in hosts.items())


def this_process() -> str:
    """Names this one of several processes, and its machine."""
    return named([Peer(int(os.environ["RANK"]), socket.gethostname())])


def ranges(numbers: Sequence[int]) -> str:
    """Writes ascending numbers in short: `0-3, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def end_here(line: str | None) -> None:
    """Reports a line and ends the process at once, although its main thread waits for another process."""
    if line is not None:
        print(line, file=sys.stderr)
    sys.stderr.flush()
    os._exit(1 if line is None else 2)


def join(store: Store, rank: int, size: int, address: str, ends: Callable[[str | None], Any] = end_here) -> Lifeline:
    """Waits until all processes have come, and returns the lines of this one.

    Args:
        store: Processes find each other by it.
        rank: Index of this process.
        size: Number of processes.
        address: Where process 0 is.
        ends: Ends the process at once, after it has reported a line, if there is one.

    Raises:
        Fault: Some have not come within `JOIN_S` seconds, or process 0 cannot be reached.
        FailedElsewhere: Another process has reported that.
    """
    own = Peer(rank, socket.gethostname())
    return Lifeline(own, _all_others(store, own, size) if rank == 0 else [_first(store, own, address)], ends)


def wait_for_first(address: str, port: int) -> None:
    """Waits until process 0 is there. The store of torch would do that too, but writes traces of its own where nobody comes.

    Raises:
        Fault: It has not come within `JOIN_S` seconds.
    """
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            socket.create_connection((address, port), timeout=max(RETRY_S, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                where = f"process 0 did not come to {address}:{port} within {JOIN_S:g} s ({error.strerror or error})"
                raise Fault(f"{where}: start all processes with the same address") from error
        time.sleep(RETRY_S)


@dataclass
class _Coming:
    """A connection that has not said who it is."""

    socket: socket.socket
    unread: bytes = b""
    connection: _Connection | None = field(default=None)


def _all_others(store: Store, own: Peer, size: int) -> list[_Connection]:
    """Waits in process 0 for all others; returns their connections in order of rank."""
    word, came, deadline = secrets.token_hex(16), dict[int, _Connection](), time.monotonic() + JOIN_S
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=size) as server, selectors.DefaultSelector() as selector:
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        store.set(KEY, json.dumps({"port": server.getsockname()[1], "word": word, "host": own.host}))
        while len(came) < size - 1 and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.data is None:
                    made, _ = server.accept()
                    made.setblocking(False)
                    selector.register(made, selectors.EVENT_READ, _Coming(made))
                elif not _hear(key.data, word, size, came):
                    selector.unregister(key.data.socket)
                    key.data.socket.close()
    for connection in came.values():
        _send(connection.socket, "start" if len(came) == size - 1 else "failed")
    if len(came) < size - 1:
        missing = [rank for rank in range(1, size) if rank not in came]
        raise Fault(
            f"{len(came) + 1} of {size} processes came within {JOIN_S:g} s: {named([own, *(one.peer for one in came.values())])}; "
            f"{ranges(missing)} did not: start all of them with the same address and number of processes"
        )
    return [came[rank] for rank in sorted(came)]


def _hear(coming: _Coming, word: str, size: int, came: dict[int, _Connection]) -> bool:
    """Reads who has come; returns whether the connection stays: a stranger's does not, nor one that was closed."""
    try:
        data = coming.socket.recv(HELLO_BYTES)
    except (BlockingIOError, InterruptedError):
        return True
    except OSError:
        data = b""
    if not data or len(coming.unread) > HELLO_BYTES:
        if coming.connection is not None and came.get(coming.connection.peer.rank) is coming.connection:
            del came[coming.connection.peer.rank]  # it was ended, and may come again
        return False
    coming.unread += data
    if coming.connection is None and coming.unread.endswith(b"\n"):
        secret, _, rest = coming.unread.decode("utf-8", "replace").strip().partition(" ")
        rank, _, host = rest.partition(" ")
        if not secrets.compare_digest(secret.encode(), word.encode()) or not rank.isdecimal() or not 0 < int(rank) < size:
            return False
        coming.connection = came[int(rank)] = _Connection(coming.socket, Peer(int(rank), host))
    return True


def _first(store: Store, own: Peer, address: str) -> _Connection:
    """Reaches process 0 and waits until all have come; returns the connection."""
    try:
        found = json.loads(store.get(KEY))
    except RuntimeError as error:  # the store waits no longer
        raise Fault(f"process 0 at {address} did not come within {JOIN_S:g} s: start all processes with the same address") from error
    try:
        reached = socket.create_connection((address, found["port"]), timeout=JOIN_S)
    except OSError as error:
        where = f"process 0 at {address}:{found['port']} ({error})"
        raise Fault(f"process {own.rank} on {own.host} cannot reach {where}; open the ports between the machines") from error
    _watch(reached)
    reached.settimeout(JOIN_S + GRACE_S)
    first = Peer(0, found["host"])
    try:
        reached.sendall(f"{found['word']} {own.rank} {own.host}\n".encode())
        answer = reached.recv(HELLO_BYTES)
    except OSError:
        answer = b""
    if answer.startswith(b"start"):
        return _Connection(reached, first, unread=answer.partition(b"\n")[2])
    reached.close()
    if answer:
        raise FailedElsewhere
    raise Fault(lost_line([first]))


def _watch(connection: socket.socket) -> None:
    """Makes the kernel give a connection up when its other end has not answered for `LOST_S` seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_S // (PROBES + 1))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, LOST_S // (PROBES + 1))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)  # of what was sent and not answered
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(connection: socket.socket, message: str) -> None:
    """Sends a message if the other end is there; the thread notices if it is not."""
    try:
        connection.sendall(f"{message}\n".encode())
    except OSError:
        return
