"""Two machines for a test: network namespaces that a cable (a veth pair) joins, with hostnames and temporary folders of their own.

Both see the same files, as nodes with a shared file system do. Making namespaces takes the right to (CAP_SYS_ADMIN, CAP_NET_ADMIN) and
the commands `ip` and `unshare`; `why_none` says what is missing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.ranks import CONTEXT

PORT = 29500
HOSTS = Path("/etc/netns")
"""`ip netns exec NAME` shows the files of /etc/netns/NAME in /etc."""
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
PR_SET_PDEATHSIG = 1


def why_none() -> str | None:
    """Returns why no namespaces can be made here; None where they can."""
    if missing := [command for command in ("ip", "unshare") if shutil.which(command) is None]:
        return f"no command {missing[0]}"
    name = f"probe-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces: {made.stderr.strip()}"
    joined = subprocess.run(
        ["ip", "-n", name, "link", "add", "name", "cable", "type", "veth", "peer", "name", "other"],
        capture_output=True,
        text=True,
        check=False,
    )
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"no veth: {joined.stderr.strip()}" if joined.returncode else None


@dataclass
class Node:
    """A machine."""

    host: str
    """Its hostname."""
    address: str
    namespace: str
    work: Path
    """A folder of its own; TMPDIR is in it."""
    running: list[Any] = field(default_factory=list)

    def start(self, work: Callable[..., object], *arguments: Any, **environment: str) -> None:
        """Calls a function in a process on the node; standard output and error go to `output`. The process is forked: importing takes long.

        Args:
            work: A function of a module.
            arguments: Its arguments.
            environment: Environment variables.
        """
        process = CONTEXT.Process(target=_on, args=(self, environment, work, arguments))
        process.start()
        self.running.append(process)

    @property
    def temporary(self) -> Path:
        """Folder for temporary files."""
        return self.work / "tmp"

    @property
    def output(self) -> Path:
        """What its processes print."""
        return self.work / "output.txt"

    def text(self) -> str:
        """Returns what its processes have printed."""
        return self.output.read_text() if self.output.exists() else ""

    def processes(self) -> list[int]:
        """Returns the ids of all processes on the node."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        return [int(line) for line in listed.stdout.split()]

    def ended(self) -> bool:
        """Whether all of its processes have ended."""
        return all(process.exitcode is not None for process in self.running) and not self.processes()

    def signal(self, number: int) -> None:
        """Sends a signal to every process on the node."""
        for process in self.processes():
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    def kill(self) -> None:
        """Kills every process on the node."""
        self.signal(signal.SIGKILL)
        for process in self.running:
            process.join()


def _on(node: Node, environment: Mapping[str, str], work: Callable[..., object], arguments: Sequence[Any]) -> None:
    """What a process of a node does."""
    libc = ctypes.CDLL(None, use_errno=True)
    network = os.open(f"/run/netns/{node.namespace}", os.O_RDONLY)
    for failed in (libc.setns(network, CLONE_NEWNET), libc.unshare(CLONE_NEWUTS | CLONE_NEWNS)):
        assert not failed, os.strerror(ctypes.get_errno())
    socket.sethostname(node.host)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", str(HOSTS / node.namespace / "hosts"), "/etc/hosts"], check=True)
    os.environ |= {"TMPDIR": str(node.temporary), **environment}
    tempfile.tempdir = None
    written = os.open(node.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(written, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # pytest has replaced them
    torch.set_num_threads(1)
    work(*arguments)


@dataclass(frozen=True)
class Nodes:
    """Two machines, `a` and `b`, and the cable between them."""

    a: Node
    b: Node

    def cable(self, plugged: bool) -> None:
        """Cuts the link, or joins it again."""
        subprocess.run(["ip", "-n", self.a.namespace, "link", "set", "cable", "up" if plugged else "down"], check=True)

    def torchrun(self, node: Node, work: Callable[..., object], *arguments: Any, restarts: int = 0, **environment: str) -> None:
        """Calls a function in one process of a node, as `torchrun --nnodes=2 --rdzv_backend=c10d` does."""
        node.start(_by_torchrun, self.a.host, restarts, work, arguments, **environment)

    def by_variables(self, node: Node, work: Callable[..., object], *arguments: Any, **environment: str) -> None:
        """Calls a function as Kubernetes does: with variables, and without a launcher."""
        rank = "0" if node is self.a else "1"
        variables = {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": self.a.host, "MASTER_PORT": str(PORT)}
        node.start(work, *arguments, **{**variables, **environment})


def _by_torchrun(host: str, restarts: int, work: Callable[..., object], arguments: Sequence[Any]) -> None:
    """What the command torchrun does, but that it forks its worker."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        run_id="run",
        rdzv_endpoint=f"{host}:{PORT}",
        rdzv_backend="c10d",
        max_restarts=restarts,
        start_method="fork",
    )
    elastic_launch(config, _forked)(work, *arguments)


def _forked(work: Callable[..., object], *arguments: Any) -> None:
    """What a worker of torchrun does: the command ends its process at once, and a function that torchrun has forked has to return."""
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            work(*arguments)
        finally:
            os._exit(1)
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(status)


@contextmanager
def two_nodes(work: Path) -> Iterator[Nodes]:
    """Makes two nodes; all of their processes are killed afterwards.

    Args:
        work: Folder for their own files.
    """
    tag = uuid.uuid4().hex[:6]
    made = []
    for number, host in enumerate(("node-a", "node-b"), 1):
        node = Node(host, f"10.77.0.{number}", f"compress-{tag}-{host[-1]}", work / host)
        node.temporary.mkdir(parents=True)
        made.append(node)
    hosts = "127.0.0.1 localhost\n" + "".join(f"{node.address} {node.host}\n" for node in made)
    a, b = made
    try:
        for node in made:
            (HOSTS / node.namespace).mkdir(parents=True)
            (HOSTS / node.namespace / "hosts").write_text(hosts)
            _ip("netns", "add", node.namespace)
        _ip("link", "add", "cable", "netns", a.namespace, "type", "veth", "peer", "name", "cable", "netns", b.namespace)
        for node in made:
            _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "cable")
            for link in ("lo", "cable"):
                _ip("-n", node.namespace, "link", "set", link, "up")
        yield Nodes(a, b)
    finally:
        for node in made:
            if (Path("/run/netns") / node.namespace).exists():
                node.kill()
                _ip("netns", "del", node.namespace)
            shutil.rmtree(HOSTS / node.namespace, ignore_errors=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[None]:
    """Mounts a disk of some MiB at a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "small", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def until(found: Callable[[], object], seconds: float, what: str) -> float:
    """Waits until something holds; returns the seconds that it took."""
    began = time.monotonic()
    while not found():
        assert time.monotonic() - began < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - began
