"""Clocks of GPUs while they work: from lines as nvidia-smi prints them, and from a process that prints such lines."""

import time

from benchmarks.gpu.clocks import COMMAND, FIELDS, summary, watching

LINES = """\
0, 0, 345, 1980, 2619, 70.10, 33
1, 100, 1980, 1980, 2619, [N/A], 40
0, 97, 1755, 1980, 2619, 650.55, 55
0, 99, 1410, 1980, 2619, 699.02, 63
0, 98, 1980, 1980, 2619, 500.00, 60
NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver
0, 99, 1
"""


def test_seconds_of_work_alone_are_counted():
    first, second = summary(LINES)
    assert first == {
        "gpu": 0,
        "seconds": 3,
        "sm_mhz": [1410.0, 1755.0, 1980.0],
        "max_sm_mhz": 1980.0,
        "mem_mhz": 2619.0,
        "power_w": 699.02,
        "temperature_c": 63.0,
    }
    assert (second["seconds"], second["power_w"], second["sm_mhz"]) == (1, None, [1980.0] * 3)
    assert summary("") == []
    [idle] = summary("0, 0, 345, 1980, 2619, 70.10, 33")
    assert (idle["seconds"], idle["sm_mhz"]) == (0, None)


def test_the_question_has_a_column_for_each_field():
    assert COMMAND[1] == f"--query-gpu={','.join(FIELDS)}"
    assert len(LINES.splitlines()[0].split(",")) == len(FIELDS)


def test_a_process_writes_until_the_end_of_the_context(tmp_path):
    file = tmp_path / "below" / "clocks.csv"
    with watching(file, ["sh", "-c", "while true; do echo 0, 90, 1980, 1980, 2619, 70.10, 33; sleep 0.02; done"]):
        deadline = time.monotonic() + 20
        while not file.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
    [found] = summary(file.read_text())
    assert found["seconds"] > 0
    size = file.stat().st_size
    time.sleep(0.1)
    assert file.stat().st_size == size
