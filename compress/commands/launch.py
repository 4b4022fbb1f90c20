"""Starts several processes of one run: by this command on one machine, or by SLURM, Kubernetes or torchrun on several.

    compress run recipe.yaml --processes 4        four processes here; ends with the status of the first process, or of the one that failed
    srun compress run recipe.yaml                 one process for each task of the step
    torchrun ... $(which compress) run ...        RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; so does Kubeflow's PyTorchJob

torch.distributed reads the five variables that torchrun sets. srun has other names for them:

    RANK, LOCAL_RANK   SLURM_PROCID, SLURM_LOCALID       WORLD_SIZE   SLURM_STEP_NUM_TASKS
    MASTER_ADDR        first host of SLURM_STEP_NODELIST    MASTER_PORT  20000 + SLURM_JOB_ID mod 20000, the same on all nodes

A batch script that calls `compress` without srun is not a step of several tasks, and is left alone.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from foundation.core.errors import InputError
from foundation.machine.environment import physical_cores
from foundation.machine.faults import FailedElsewhere
from foundation.machine.lifeline import WATCHED
from foundation.machine.process import spawn

T = TypeVar("T")

FIRST_PORT, PORTS = 20000, 20000
POLL_S = 0.1
GRACE_S = 5.0
"""Seconds that the others have to end by themselves after one has failed."""
STOPPED_S = 20.0
"""Seconds that they may take to end after a signal; then they are killed."""
_HOST = re.compile(r"(?P<name>[^,\[]+)(?:\[(?P<number>\d+)[^\]]*\](?P<rest>[^,]*))?")


def from_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of torch.distributed for a process that srun started as one of several; empty for any other process."""
    if "RANK" in variables or "SLURM_PROCID" not in variables or int(variables.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return {}
    return {
        "RANK": variables["SLURM_PROCID"],
        "LOCAL_RANK": variables.get("SLURM_LOCALID", "0"),
        "WORLD_SIZE": variables["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": first_host(variables.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        "MASTER_PORT": str(FIRST_PORT + int(variables.get("SLURM_JOB_ID", "0")) % PORTS),
    }


def first_host(nodes: str) -> str:
    """Returns the first host of SLURM's short form of a list: `node03` of `node[03-05,9],other`.

    Raises:
        InputError: The list has another form.
    """
    found = _HOST.match(nodes)
    if found is None:
        raise InputError("SLURM_STEP_NODELIST", f"{nodes!r} given", "a list of hosts, such as node[01-04], is allowed")
    return f"{found['name']}{found['number'] or ''}{found['rest'] or ''}"


def refused_once(read: Callable[[], T], first: bool) -> T:
    """Reads in every process that `start` has started, before they know each other; the first one alone reports a mistake.

    Args:
        read: Reads the same files everywhere.
        first: Whether this is process 0.

    Raises:
        InputError: The mistake.
        FailedElsewhere: The first process reports it.
    """
    try:
        return read()
    except InputError as error:
        if WATCHED in os.environ and not first:
            raise FailedElsewhere from error
        raise


def start(processes: int, command: Sequence[str]) -> int:
    """Runs a command in several processes on this machine, and returns its exit status.

    If one fails, the others are ended; all die with this process. The status is the first process's where that failed too, else the status
    of the one that did.

    Args:
        processes: Number of processes, at least 2.
        command: The command, without what started this.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    default = {
        "OMP_NUM_THREADS": str(max(1, physical_cores() // processes)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # a process that lost another one warns with a trace in C++; `_watched` says it in a line
    }
    shared = {WATCHED: "1", "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    every = {**default, **os.environ, **shared}
    started = [spawn(command, env={**every, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(processes)]
    try:
        return _watched(started)
    except KeyboardInterrupt:  # the terminal has signalled the others too; a supervisor that stops this process has not
        _end(started)
        raise


def _watched(started: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for all processes, or for the first that fails; returns the status to end with."""
    while all(process.poll() in (None, 0) for process in started):
        if all(process.poll() == 0 for process in started):
            return 0
        time.sleep(POLL_S)
    failed = next(process.returncode for process in started if process.returncode)
    deadline = time.monotonic() + GRACE_S  # the others notice by themselves, and the first one has the reason
    while time.monotonic() < deadline and any(process.poll() is None for process in started):
        time.sleep(POLL_S)
    statuses = [process.poll() for process in started]
    _end(started)
    own = statuses[0] or 0
    killed = next(((rank, -status) for rank, status in enumerate(statuses) if status is not None and status < 0), None)
    if killed is None:
        return own if own > 0 else failed
    rank, number = killed
    print(f"process {rank} of {len(started)} was ended by {signal.Signals(number).name}", file=sys.stderr)
    return own if own > 1 else 128 + number  # the others end with 1: they only notice a broken connection


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + STOPPED_S
    for process in started:
        if process.poll() is None:
            process.terminate()
    for process in started:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
