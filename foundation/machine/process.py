"""Child processes that die with their parent, and malloc settings for large tensors.

`spawn` starts the child through a tiny launcher (this file run as a script, about 15 ms). The alternatives are worse: a `preexec_fn` is
unsafe in a process with threads, and a call in the child's own main would come only after seconds of imports. There are two modes:

- `spawn(command)` is for a single process. The launcher asks the kernel to SIGKILL the child when its parent dies (prctl
  PR_SET_PDEATHSIG), checks that the parent is still alive, and execs the command. The setting survives exec, and the process id is the
  command's own. The kernel watches the *thread* that called spawn, so call it from a thread that lives as long as the child.
- `spawn(command, group=True)` is for a command with children of its own, such as a server. The launcher keeps running: it starts the
  command in a new process group, watches the parent through a pidfd, and kills the whole group when the parent or the command itself has
  ended. On SIGTERM or SIGINT it sends the group SIGTERM, and SIGKILL after a grace period.

By default glibc returns large blocks to the kernel on every free and faults them in again, page by page, after the next malloc. Tensors of
a few MiB then cost more in page faults than in arithmetic (MiniLM fp32 at 1 x 128: 80 ms instead of 20). `environment` makes children keep
freed memory, `keep_freed_memory` does so in this process. glibc ignores thresholds above 32 MiB, hence mmap_max=0.
`freed_memory_returned` restores the default for work where memory matters more than time. Blocks of many sizes do not fit into each other's
places, so that kept memory grows to several times what is in use; `return_memory_if_short` returns it when the machine has as little left.

Limitations: without prctl (not Linux) children are not killed; C libraries other than glibc ignore the malloc settings.
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
from typing import IO, ClassVar

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
KILLED = 128 + signal.SIGKILL
GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL when a group is stopped."""
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
        env: The complete environment of the command; `environment()` by default.
        group: Run the command in a process group of its own and kill the whole group; the returned process is then the launcher.
        stdin: As for `subprocess.Popen`.
        stdout: As for `subprocess.Popen`.
        stderr: As for `subprocess.Popen`.
        cwd: Working folder of the command.

    Returns:
        The process. It exits with status 127 if the command cannot be started.
    """
    launch = _launcher("group" if group else "exec", command)
    return subprocess.Popen(launch, env=environment() if env is None else env, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd)


def environment(**extra: str) -> dict[str, str]:
    """Returns the environment for a child: this process's own, set up to keep freed memory and to import our packages, plus `extra`."""
    root = str(Path(__file__).resolve().parents[2])
    tunables = ":".join(part for part in (os.environ.get("GLIBC_TUNABLES"), TUNABLES) if part)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    return {**os.environ, "GLIBC_TUNABLES": tunables, "PYTHONPATH": path, **extra}


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory in this process; returns whether the C library accepted the setting."""
    return _set_malloc({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1})


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Inside the block, malloc returns freed memory to the system, all but 16 MiB.

    Afterwards malloc keeps freed memory again if it did before, because of `keep_freed_memory` or the environment of this process.
    """
    kept = _Malloc.keeps_freed or TUNABLES in os.environ.get("GLIBC_TUNABLES", "")
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


def peak_memory_bytes(process: int | None = None) -> int:
    """Returns the peak resident size of this process since its program started, or of another process, by its id.

    `resource.getrusage` would count the size of the process that started it, too: the kernel keeps that maximum when a program is started.
    """
    return _kilobytes(Path(f"/proc/{process or 'self'}/status"), "VmHWM") * 1024


def trim_memory() -> None:
    """Returns the memory that malloc holds free to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)


def return_memory_if_short() -> bool:
    """Returns the memory that malloc holds free to the system if it is more than what is left there; returns whether it was.

    For loops whose blocks have another size in every turn, such as training on batches of many lengths. Returning it every time would cost
    as much in page faults as keeping it saves.
    """
    measure = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if measure is None:  # not glibc, or one older than 2.33
        return False
    measure.restype = _Mallinfo
    held = _kilobytes(Path("/proc/self/status"), "RssAnon") * 1024 - measure().in_use
    if held <= available_memory_bytes():
        return False
    trim_memory()
    return True


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Returns how many bytes can still be taken: of the machine, or of a control group (container, service, batch job) of this process if
    that is less. A limit of a group holds for all groups in it.

    Args:
        root: Folder with `proc` and `sys`.
    """
    return min([_kilobytes(root / "proc/meminfo", "MemAvailable") * 1024, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yields how many bytes each control group of this process has left (cgroup v2, and v1 with its own names)."""
    mount, listed = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []
    inside = {names: path.strip("/") for _, names, path in (line.split(":", 2) for line in lines)}
    kinds = [(mount, inside.get("", ""), "memory.max", "anon")]
    kinds += [
        (mount / "memory", path, "memory.limit_in_bytes", "total_rss") for names, path in inside.items() if "memory" in names.split(",")
    ]
    for top, path, limit, used in kinds:
        group = top / path  # in a container the path may be that on the host; the container's own limit is then at the top
        for folder in dict.fromkeys([*(parent for parent in (group, *group.parents) if parent.is_relative_to(top)), top]):
            if not (folder / limit).exists() or not (folder / "memory.stat").exists():
                continue
            most = (folder / limit).read_text(encoding="utf-8").strip()
            if most != "max":
                taken = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
                yield max(0, int(most) - int(taken.get(used, 0)))  # the kernel drops cached files first


def _kilobytes(file: Path, name: str) -> int:
    """Returns a line of a file that the kernel writes, in KiB."""
    return next(int(line.split()[1]) for line in file.read_text(encoding="utf-8").splitlines() if line.startswith(f"{name}:"))


class _Mallinfo(ctypes.Structure):
    """Result of glibc's `mallinfo2`."""

    _fields_: ClassVar = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]

    @property
    def in_use(self) -> int:
        """Bytes that the program has taken and not freed."""
        return int(self.uordblks + self.hblkhd)


class _Malloc:
    """The last setting made in this process; the C library has no way to query it."""

    keeps_freed = False


def _set_malloc(settings: Mapping[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    _Malloc.keeps_freed = settings.get(M_MMAP_MAX) == 0
    taken = [bool(mallopt(name, value)) for name, value in settings.items()]
    return all(taken)


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies; exits at once if `parent` is no longer its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(KILLED)


def _launcher(mode: str, command: Sequence[str]) -> list[str]:
    # -I -S: starts fast, and no file in this folder can shadow a module of the standard library
    return [sys.executable, "-I", "-S", __file__, mode, str(os.getpid()), *command]


def _supervise(parent: int, command: Sequence[str]) -> int:
    """Runs `command` in its own process group until it or the parent ends; returns its exit status."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: signals.append(received))
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        return KILLED
    if os.getppid() != parent:
        return KILLED
    child = subprocess.Popen(_launcher("exec", command), process_group=0)
    ended = os.pidfd_open(child.pid)
    poller, terminated_at = select.poll(), None
    poller.register(watched, select.POLLIN)
    poller.register(ended, select.POLLIN)
    while ended not in (ready := {descriptor for descriptor, _ in poller.poll(100)}):
        if watched in ready or (terminated_at is not None and time.monotonic() > terminated_at + GRACE_S):
            _kill(child.pid, signal.SIGKILL)
        elif signals and terminated_at is None:
            _kill(child.pid, signal.SIGTERM)
            terminated_at = time.monotonic()
    _kill(child.pid, signal.SIGKILL)  # before it is reaped: until then the system cannot reuse its group id
    status = child.wait()
    return status if status >= 0 else 128 - status


def _kill(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:  # the group has ended, or the child has not joined it yet and is signalled again later
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
