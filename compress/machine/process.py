"""Child processes that die with their parent, however it dies.

Two ways, both through a tiny launcher (this file run as a script, about 15 ms), because a `preexec_fn` is unsafe beside threads and
a call at the start of the child's own main comes after seconds of imports:

- `spawn(command)` asks the kernel to SIGKILL the child when its parent dies (prctl PR_SET_PDEATHSIG), checks that the parent did not
  die in between, and execs the command: the setting outlives exec, the process id is that of the command. It is for one process. The kernel
  watches the *thread* that called spawn: call it from one that lives as long as the child.
- `spawn(command, group=True)` is for a command with children of its own, such as a server. The launcher stays: it runs the command in
  a process group of its own, watches the parent through a pidfd, and kills the whole group when the parent, or the command itself, is
  gone. SIGTERM and SIGINT to the launcher end the group gently, then by force.

glibc hands big blocks back to the kernel at every free, and takes them again, page by page, at the next malloc: tensors of a few MiB
then cost more in page faults than in arithmetic (MiniLM fp32 at 1 x 128: 80 ms against 20). `environment` switches that off for
children, `keep_freed_memory` for the running process. Thresholds above 32 MiB are ignored by glibc, hence mmap_max=0. Where memory is what
counts, and not time, `freed_memory_returned` switches it on again.

Left out: systems without prctl, where children are not killed; other C libraries, where the tunables do nothing.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
KILLED = 128 + signal.SIGKILL
GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL of a group."""
TUNABLES = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967296"
Stream = int | IO[bytes] | None


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    group: bool = False,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a command that dies with this process.

    Args:
        command: Program and arguments.
        env: Its whole environment; `environment()` where absent.
        group: Give it a process group of its own and kill all of it; the returned process is then the watcher.
        stdin: As of `subprocess.Popen`.
        stdout: As of `subprocess.Popen`.
        stderr: As of `subprocess.Popen`.
        cwd: Its working folder.

    Returns:
        The process. A command that cannot be started ends with status 127.
    """
    launch = _launcher("group" if group else "exec", command)
    return subprocess.Popen(launch, env=environment() if env is None else env, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd)


def environment(**extra: str) -> dict[str, str]:
    """Returns this process's environment for a child: freed memory is kept, our packages can be imported, plus `extra`."""
    root = str(Path(__file__).resolve().parents[2])
    tunables = ":".join(part for part in (os.environ.get("GLIBC_TUNABLES"), TUNABLES) if part)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    return {**os.environ, "GLIBC_TUNABLES": tunables, "PYTHONPATH": path, **extra}


def keep_freed_memory() -> bool:
    """Makes malloc of this process keep what is freed; returns whether the C library took the setting."""
    return _set_malloc({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1})


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Has malloc of this process give freed memory back to the system, but for 16 MiB, for as long as the block lasts.

    Afterwards it keeps what is freed again where it did so before, by `keep_freed_memory` or by the environment of a child.
    """
    kept = _Malloc.kept or TUNABLES in os.environ.get("GLIBC_TUNABLES", "")
    _set_malloc({M_MMAP_MAX: 2**16, M_MMAP_THRESHOLD: 2**22, M_TRIM_THRESHOLD: 2**24})
    trim_memory()
    try:
        yield
    finally:
        trim_memory()
        if kept:
            keep_freed_memory()
        else:
            _set_malloc({M_MMAP_THRESHOLD: 2**25})


def trim_memory() -> None:
    """Gives what malloc holds back to the system: what was freed before it was told to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)


class _Malloc:
    """What this process was told last; the C library cannot be asked."""

    kept = False


def _set_malloc(settings: Mapping[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    _Malloc.kept = settings.get(M_MMAP_MAX) == 0
    taken = [bool(mallopt(name, value)) for name, value in settings.items()]
    return all(taken)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies; ends it at once where `parent` is not its parent any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(KILLED)


def _launcher(mode: str, command: Sequence[str]) -> list[str]:
    # -I -S: starts fast, and no module beside this file can shadow one of the standard library
    return [sys.executable, "-I", "-S", __file__, mode, str(os.getpid()), *command]


def _supervise(parent: int, command: Sequence[str]) -> int:
    """Runs `command` in a group of its own until it ends or the parent does; returns its exit status."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: asked.append(received))
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        return KILLED
    if os.getppid() != parent:
        return KILLED
    child = subprocess.Popen(_launcher("exec", command), process_group=0)
    ended = os.pidfd_open(child.pid)
    poller, told = select.poll(), None
    poller.register(watched, select.POLLIN)
    poller.register(ended, select.POLLIN)
    while ended not in (ready := {descriptor for descriptor, _ in poller.poll(100)}):
        if watched in ready or (told is not None and time.monotonic() > told + GRACE_S):
            _kill(child.pid, signal.SIGKILL)
        elif asked and told is None:
            _kill(child.pid, signal.SIGTERM)
            told = time.monotonic()
    _kill(child.pid, signal.SIGKILL)  # before it is reaped: until then its group id cannot belong to anybody else
    status = child.wait()
    return status if status >= 0 else 128 - status


def _kill(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:  # all of it is gone, or the child has not reached its group yet and is asked again
        return


def _main(mode: str, parent: int, command: list[str]) -> int:
    if mode == "group":
        return _supervise(parent, command)
    die_with(parent)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
