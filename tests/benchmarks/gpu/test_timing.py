"""Times of kernels, with a queue and a clock that are wound by hand: what is counted, in which order, and how often."""

from collections.abc import Callable

import pytest
import torch

from benchmarks.gpu import timing as timed
from benchmarks.gpu.peaks import GPUS, NAMED, named
from benchmarks.gpu.timing import BATCH, MAX_MS, MAX_SAMPLES, MIN_SAMPLES, ROUNDS, WARM_UP, in_turns, median_ms
from export.kernels.launch import Cost


class Queue:
    """Work takes its time, and more where the cache was not emptied before; emptying it takes time that nobody may count."""

    def __init__(self) -> None:
        self.now, self.cold, self.waiting = 0.0, False, 0
        self.order: list[str] = []

    def work(self, name: str, ms: float) -> Callable[[], None]:
        def once() -> None:
            self.order.append(name)
            self.now += ms if self.cold else ms / 100
            self.cold = False
            self.waiting += 1

        return once

    def clear(self) -> None:
        self.now += 50.0
        self.cold = True

    def mark(self) -> float:
        return self.now

    def wait(self) -> None:
        self.waiting = 0

    def milliseconds(self, begin: float, end: float) -> float:
        assert self.waiting == 0, "an event has not happened yet"
        return end - begin


def test_samples_are_cold_and_take_turns_after_a_warm_up() -> None:
    queue = Queue()
    found = in_turns({"dense": queue.work("a", 0.2), "sparse": queue.work("b", 0.1)}, queue)
    assert found["dense"] == pytest.approx([0.2] * MAX_SAMPLES)
    assert found["sparse"] == pytest.approx([0.1] * MAX_SAMPLES)
    changes = [name for at, name in enumerate(queue.order) if at == 0 or queue.order[at - 1] != name]
    assert changes == ["a", "b"] * ROUNDS
    assert len(queue.order) == 2 * (MAX_SAMPLES + ROUNDS * WARM_UP)


def test_slow_work_is_sampled_as_often_as_is_asked_for_at_least() -> None:
    queue = Queue()
    found = in_turns({"": queue.work("a", MAX_MS)}, queue)[""]
    assert MIN_SAMPLES <= len(found) < MIN_SAMPLES + BATCH


def test_the_median_is_not_moved_by_a_few_slow_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, numbers = Queue(), iter(range(10_000))
    fast, slow = queue.work("a", 0.1), queue.work("a", 5.0)
    assert median_ms(lambda: slow() if next(numbers) % 5 == 0 else fast(), queue) == pytest.approx(0.1)
    monkeypatch.setattr(timed, "ROUNDS", 1)
    assert len(in_turns({"": fast}, queue)[""]) == MAX_SAMPLES


NAMES = {
    "NVIDIA A100-SXM4-80GB": "A100 SXM",
    "NVIDIA A100 80GB PCIe": "A100 PCIe",
    "NVIDIA A30": "A30",
    "NVIDIA A10": "A10",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA B200": "B200",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
}


def test_a_gpu_is_known_by_the_name_of_its_driver() -> None:
    assert {name: found.name for name in NAMES if (found := named(name)) is not None} == NAMES
    assert {gpu.name for _, gpu in NAMED} == set(NAMES.values())
    for other in (
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA L40",
        "NVIDIA A100X",
        "Tesla T4",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA H200 NVL",
        "NVIDIA A10G",
    ):
        assert named(other) is None, other


def test_the_floor_is_the_slower_of_memory_and_units() -> None:
    gpu = GPUS[90]
    assert gpu.floor_s(Cost(3_350_000_000, 1, "int8")) == pytest.approx(1e-3)
    assert gpu.floor_s(Cost(1, 1_979_000_000_000, "int8")) == pytest.approx(1e-3)
    assert gpu.floor_s(Cost(1, 989_000_000_000, "fp16")) == pytest.approx(1e-3)


def test_no_last_cache_is_larger_than_what_is_written_over() -> None:
    assert timed.CACHE_BYTES >= 126 * 2**20
    assert torch.int8.itemsize == 1
