import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foundation.machine import process

pytestmark = pytest.mark.whole

ROOT = str(Path(process.__file__).parents[2])
PARENT = """
import sys, time
from foundation.machine.process import spawn
child = spawn(["sh", "-c", sys.argv[2]], group=sys.argv[1] == "group")
print(child.pid, flush=True)
time.sleep(1000)
"""
FAULTS = """
import resource, sys
from foundation.machine.process import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    bytearray(48 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def pids_in(folder: Path, count: int) -> list[int]:
    """Waits until `count` processes have written their ids to files."""
    while len(found := [file for file in folder.iterdir() if file.read_text().strip()]) < count:
        time.sleep(0.02)
    return [int(file.read_text()) for file in found]


def start_parent(mode: str, shell: str) -> tuple[subprocess.Popen[bytes], int]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, mode, shell], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ROOT})
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    parent, child = start_parent("exec", f"echo $$ > {tmp_path}/child; exec sleep 1000")
    assert pids_in(tmp_path, 1) == [child]  # the launcher became the command
    parent.kill()
    parent.wait()
    assert gone([child])


def test_a_whole_group_dies_with_the_parent(tmp_path: Path) -> None:
    parent, watcher = start_parent("group", f"sh -c 'echo $$ > {tmp_path}/b; exec sleep 1000' & echo $$ > {tmp_path}/a; exec sleep 1000")
    members = pids_in(tmp_path, 2)
    assert {os.getpgid(pid) for pid in members} == {os.getpgid(members[0])} != {os.getpgid(watcher)}
    parent.kill()
    parent.wait()
    assert gone([watcher, *members])


def test_a_command_dies_with_its_watcher(tmp_path: Path) -> None:
    parent, watcher = start_parent("group", f"echo $$ > {tmp_path}/a; exec sleep 1000")
    members = pids_in(tmp_path, 1)
    os.kill(watcher, signal.SIGKILL)
    assert gone(members)
    parent.kill()
    parent.wait()


def test_terminate_reaches_the_group_and_nothing_survives_the_command(tmp_path: Path) -> None:
    shell = f"trap 'exit 7' TERM; (trap '' TERM; echo $BASHPID > {tmp_path}/b; sleep 1000) & echo $$ > {tmp_path}/a; wait"
    watcher = process.spawn(["bash", "-c", shell], group=True)
    members = pids_in(tmp_path, 2)
    watcher.terminate()
    assert watcher.wait(timeout=10) == 7
    assert gone(members)


def test_a_stubborn_group_is_killed_after_the_grace(tmp_path: Path) -> None:
    short = f"import sys; sys.path.insert(0, {ROOT!r}); from foundation.machine import process; process.GRACE_S = 0.3; "
    command = ["bash", "-c", f"trap '' TERM; echo $$ > {tmp_path}/a; while true; do sleep 0.1; done"]
    watcher = subprocess.Popen([sys.executable, "-c", short + f"sys.exit(process._supervise({os.getpid()}, {command!r}))"])
    members = pids_in(tmp_path, 1)
    watcher.terminate()
    assert watcher.wait(timeout=10) == process.KILLED
    assert gone(members)


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize(("command", "status"), [(["sh", "-c", "exit 3"], 3), (["/no/such/program"], 127)])
def test_the_exit_status_is_that_of_the_command(group: bool, command: list[str], status: int) -> None:
    assert process.spawn(command, group=group, stderr=subprocess.DEVNULL).wait(timeout=20) == status


@pytest.mark.parametrize("mode", ["exec", "group"])
def test_a_parent_that_died_in_between_is_noticed(mode: str, tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "1000"])  # alive, but not the parent: the parent died and its child was adopted
    launch = [sys.executable, "-I", "-S", process.__file__, mode, str(other.pid), "touch", str(tmp_path / "ran")]
    assert subprocess.run(launch, timeout=20, check=False).returncode == process.KILLED
    assert not (tmp_path / "ran").exists()
    other.kill()
    other.wait()


def test_pipes_reach_the_command() -> None:
    child = process.spawn(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.communicate(b"through", timeout=20)[0] == b"through"


def page_faults(mode: str, env: dict[str, str]) -> int:
    return int(subprocess.run([sys.executable, "-c", FAULTS, mode], env=env, capture_output=True, check=True).stdout)


def test_freed_memory_is_kept() -> None:
    plain = {**{name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}, "PYTHONPATH": ROOT}
    usual = page_faults("usual", plain)
    assert page_faults("usual", process.environment()) < usual / 5
    assert page_faults("keep", plain) < usual / 5


ANONYMOUS = """
import re, sys
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
"""
"""In MiB."""
RETURNED = """
from foundation.machine.process import freed_memory_returned, keep_freed_memory
def left(size):  # of 64 MiB that were taken in blocks of that size, with one that stays above them
    before, blocks = anonymous(), [b"x" * size for _ in range(2**26 // size)]
    blocks[:-1] = []
    return anonymous() - before
if sys.argv[1] == "keep":
    keep_freed_memory()
kept = left(2**24)
with freed_memory_returned():
    returned = left(2**24)
again = left(2**24)
print(kept, returned, again)
"""


@pytest.mark.parametrize("mode", ["keep", "usual"])
def test_freed_memory_is_returned_for_a_while(mode: str) -> None:
    plain = {**{name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}, "PYTHONPATH": ROOT}
    ran = subprocess.run([sys.executable, "-c", ANONYMOUS + RETURNED, mode], env=plain, capture_output=True, check=True)
    kept, returned, again = map(int, ran.stdout.split())
    assert returned < 24  # the block that stays, and a little
    if mode == "keep":
        assert min(kept, again) > 40


def test_environment_adds_to_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    env = process.environment(EXTRA="1")
    assert env["GLIBC_TUNABLES"] == f"glibc.malloc.check=0:{process.TUNABLES}"
    assert env["PYTHONPATH"].split(os.pathsep) == [ROOT, "/somewhere"]
    assert (env["EXTRA"], env["HOME"]) == ("1", os.environ["HOME"])


@pytest.mark.slow
def test_the_peak_is_that_of_the_program_and_not_of_its_parent() -> None:
    ballast = bytearray(b"x") * (400 << 20)
    code = "from foundation.machine.process import peak_memory_bytes; small = peak_memory_bytes(); x = b'x' * (90 << 20); del x; "
    command = [sys.executable, "-c", f"{code}print(small, peak_memory_bytes())"]
    child = process.spawn(command, env=process.environment() | {"PYTHONPATH": ROOT}, stdout=subprocess.PIPE)
    small, large = map(int, child.communicate(timeout=60)[0].split())
    assert len(ballast) <= process.peak_memory_bytes()
    assert small < 200 << 20
    assert large - small >= 80 << 20


def test_what_is_left_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    4000 kB\n", encoding="utf-8")
    assert process.available_memory_bytes(tmp_path) == 4000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n", encoding="utf-8")
    assert process.available_memory_bytes(tmp_path) == 4000 * 1024
    (group / "memory.stat").write_text("anon 1000000\nfile 700000\n", encoding="utf-8")
    for limit, left in [(3_000_000, 2_000_000), (9_000_000, 4000 * 1024), (900_000, 0)]:
        (group / "memory.max").write_text(f"{limit}\n", encoding="utf-8")
        assert process.available_memory_bytes(tmp_path) == left


@pytest.mark.parametrize(
    ("listed", "folder", "limit", "used"),
    [
        ("0::/user.slice/job/step", "user.slice/job", "memory.max", "anon"),
        ("5:cpu:/x\n4:memory:/job/step", "memory/job", "memory.limit_in_bytes", "total_rss"),
    ],
)
def test_a_limit_of_a_group_holds_for_the_groups_in_it(listed: str, folder: str, limit: str, used: str, tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable:    4000 kB\n", encoding="utf-8")
    (tmp_path / "proc/self/cgroup").write_text(f"{listed}\n", encoding="utf-8")
    assert process.available_memory_bytes(tmp_path) == 4000 * 1024
    group = tmp_path / "sys/fs/cgroup" / folder
    (group / "step").mkdir(parents=True)
    (group / limit).write_text("3000000\n", encoding="utf-8")
    (group / "memory.stat").write_text(f"{used} 1000000\n", encoding="utf-8")
    assert process.available_memory_bytes(tmp_path) == 2_000_000


SHORT = """
from foundation.machine import process
process.keep_freed_memory()
before, blocks = anonymous(), [b"x" * 2**20 for _ in range(256)]
blocks[:-1] = []
process.available_memory_bytes = lambda: int(sys.argv[1]) << 20
print(process.return_memory_if_short(), anonymous() - before, process.return_memory_if_short())
"""


@pytest.mark.parametrize(("left", "returns"), [(128, True), (512, False)])
def test_held_memory_is_returned_when_less_is_left(left: int, returns: bool) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ANONYMOUS + SHORT, str(left)], env=process.environment(), capture_output=True, text=True, check=True
    )
    did, grown, again = ran.stdout.split()
    assert (did, again) == (str(returns), "False")
    assert int(grown) < 32 if returns else int(grown) > 200
