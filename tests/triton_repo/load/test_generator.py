"""Both loops on a clock of their own, against queues by hand: python -m pytest tests/triton_repo/load/test_generator.py"""

import asyncio

import numpy as np
import pytest

from tests.triton_repo.load.virtual_time import block, now, run
from triton_repo.load.arrivals import poisson
from triton_repo.load.figures import figures
from triton_repo.load.generator import TICK_SECONDS, Failure, closed_loop, open_loop
from triton_repo.load.settings import Load

SERVICE, STALL = 0.002, (1.0, 1.5)


class Server:
    """Answers one request after the other, each in 2 ms, and stands still from 1.0 to 1.5 s."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.arrived: list[float] = []

    async def send(self, index: int) -> None:
        self.arrived.append(now())
        async with self.turn:  # first come, first served
            if STALL[0] <= now() < STALL[1]:
                await asyncio.sleep(STALL[1] - now())
            await asyncio.sleep(SERVICE)


def by_hand(due) -> np.ndarray:
    """Latency of each request: it begins when it is due and the one before has ended, but not in the stall."""
    latencies, free = [], 0.0
    for moment in due:
        begun = max(moment, free)
        if STALL[0] <= begun < STALL[1]:
            begun = STALL[1]
        free = begun + SERVICE
        latencies.append(free - moment)
    return np.array(latencies)


def latencies_of(samples) -> np.ndarray:
    """In the order in which they were due."""
    order = np.argsort(samples.due)
    return (np.array(samples.ended) - np.array(samples.due))[order]


async def waiting_loop(send, due) -> np.ndarray:
    """The generator that this project does not have: it sends after the answer to the one before, and counts from the sending."""
    start, latencies = now(), []
    for index, moment in enumerate(due):
        await asyncio.sleep(max(0.0, start + moment - now()))
        sent = now()
        await send(index)
        latencies.append(now() - sent)
    return np.array(latencies)


@pytest.mark.parametrize("rate", [20.0, 100.0, 400.0])
def test_open_loop_is_the_queue_by_hand(rate):
    due = poisson(rate, 4.0, seed=5)

    async def work():
        server = Server()
        return await open_loop(server.send, due.tolist(), 10_000), server.arrived

    samples, arrived = run(work())
    np.testing.assert_allclose(arrived, due, atol=1e-6)
    np.testing.assert_allclose(latencies_of(samples), by_hand(due), atol=1e-6)
    assert max(samples.lag) < 1e-6
    assert samples.kinds == ["answered"] * len(due)


def test_a_stall_is_in_the_p99_and_a_generator_that_waits_hides_it():
    due = poisson(100.0, 4.0, seed=5)
    hit = (due >= STALL[0]) & (due < STALL[1])
    assert hit.sum() > 30

    async def both():
        return await open_loop(Server().send, due.tolist(), 10_000)

    async def waits():
        return await waiting_loop(Server().send, due)

    samples = run(both())
    latencies = latencies_of(samples)
    assert (latencies[hit] >= STALL[1] - due[hit]).all(), "each request that was due in the stall has waited for its end"
    found = figures(samples, Load(rate=100.0, seconds=4.0))["latency_ms"]
    assert found["p99"] == pytest.approx(1e3 * np.percentile(by_hand(due), 99), abs=0.01)
    assert found["p99"] > 400
    assert found["p90"] > 20
    hidden = run(waits())
    assert (hidden > 0.1).sum() == 1
    assert np.percentile(hidden, 99) < 0.01


def test_closed_loop_sees_a_stall_once_for_each_worker():
    async def work():
        return await closed_loop(Server().send, 3, 4.0)

    samples = run(work())
    assert (latencies_of(samples) > 0.1).sum() == 3


@pytest.mark.parametrize("concurrency", [1, 5])
def test_closed_loop_keeps_exactly_as_many_under_way(concurrency):
    async def work():
        under_way, seen, numbers = 0, [], []

        async def send(index):
            nonlocal under_way
            under_way += 1
            numbers.append(index)
            await asyncio.sleep(0.003 + 0.001 * (index % 4))
            under_way -= 1

        async def watch():
            for _ in range(1000):
                await asyncio.sleep(0.0007771234)  # never when one ends
                seen.append(under_way)

        samples, _ = await asyncio.gather(closed_loop(send, concurrency, 1.0), watch())
        return samples, seen, numbers

    samples, seen, numbers = run(work())
    assert set(seen) == {concurrency}
    assert numbers == list(range(len(samples.kinds)))
    assert len(numbers) == pytest.approx(concurrency / 0.0045, rel=0.02)
    assert max(samples.due) < 1.0 <= max(samples.ended)


def test_requests_beyond_the_bound_are_shed_and_counted():
    """40 are due within 4 s; the server answers nothing before 2 s, then at once."""

    async def work():
        async def send(index):
            await asyncio.sleep(max(0.0, 2.0 - now()))

        return await open_loop(send, [0.1 * index + 0.05 for index in range(40)], most=7)

    samples = run(work())
    due_of_shed = sorted(due for due, kind in zip(samples.due, samples.kinds, strict=True) if kind == "shed")
    assert due_of_shed == pytest.approx([0.1 * index + 0.05 for index in range(7, 20)])
    found = figures(samples, Load(rate=10.0, seconds=4.0, outstanding=7))
    assert (found["n"], found["answered"], found["shed"], found["sent_per_s"]) == (40, 27, 13, 6.75)
    assert found["latency_of_all_ms"]["max"] is None
    assert found["latency_ms"]["max"] == pytest.approx(1950)
    assert any("13 of 40 requests were not sent, because 7 were under way" in line for line in found["warnings"])


def test_errors_are_noted_by_kind_with_their_latency():
    async def work():
        async def send(index):
            await asyncio.sleep(0.001 * (1 + index % 4))
            return [None, Failure("refused", "full"), Failure("timed_out", f"late {index}"), Failure("failed", "bad")][index % 4]

        return await open_loop(send, [0.01 * index for index in range(40)], 100)

    found = figures(run(work()), Load(rate=100.0, seconds=0.4))
    assert {kind: about["n"] for kind, about in found["errors"].items()} == {"refused": 10, "timed_out": 10, "failed": 10}
    assert [about["max"] for about in found["errors"].values()] == pytest.approx([2, 3, 4])
    assert found["errors"]["timed_out"]["first"] == "late 2"
    assert (found["answered"], found["latency_ms"]["max"]) == (10, pytest.approx(1))


def test_a_generator_that_is_held_up_says_so_and_its_latencies_contain_it():
    """The loop stands still for 0.3 s at a request; the 30 that were due meanwhile are sent late, and count from when they were due."""
    due = [0.01 * index for index in range(100)]

    async def work():
        async def send(index):
            if index == 10:
                block(0.3)
            await asyncio.sleep(0.001)

        return await open_loop(send, due, 1000)

    samples = run(work())
    late = np.array([max(0.0, 0.1 + 0.3 - moment) if moment > 0.1 else 0.0 for moment in due])
    np.testing.assert_allclose(samples.lag, late, atol=1e-6)
    expected = late + 0.001
    expected[9:11] = latencies_of(samples)[9:11]  # those under way while it stood still
    np.testing.assert_allclose(latencies_of(samples), expected, atol=1e-6)
    found = figures(samples, Load(rate=100.0, seconds=1.0))
    assert found["lag_ms"]["max"] == pytest.approx(290)
    assert any(line.startswith("the generator was late by 290.0 ms") for line in found["warnings"])


def test_a_closed_loop_that_is_held_up_says_so():
    async def work():
        async def send(index):
            if index == 10:
                block(0.2)
            await asyncio.sleep(0.001)

        return await closed_loop(send, 1, 1.0)

    samples = run(work())
    assert 0.2 - TICK_SECONDS - 1e-6 <= max(samples.lag) <= 0.2
    assert sorted(samples.lag)[-2] < 1e-6


@pytest.mark.parametrize("loop", [lambda send: open_loop(send, [0.0, 0.1], 10), lambda send: closed_loop(send, 2, 1.0)])
def test_a_fault_of_the_generator_is_no_failed_request(loop):
    async def send(index):
        raise KeyError("ours")

    with pytest.raises(ExceptionGroup, match="TaskGroup") as caught:
        run(loop(send))
    assert isinstance(caught.value.exceptions[0], KeyError)


def test_the_processor_is_counted_while_requests_are_sent():
    async def work():
        async def send(index):
            sum(range(20_000))
            await asyncio.sleep(0.001)

        return await closed_loop(send, 1, 0.2)

    samples = asyncio.run(work())
    assert 0 < samples.cpu_seconds <= 1.1 * samples.wall_seconds
    assert samples.wall_seconds >= 0.19
