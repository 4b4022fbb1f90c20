"""The generator's process, and what it sends: python -m pytest tests/triton_repo/load/test_process.py"""

import asyncio
import os
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.core.errors import InputError
from tests.problems import raises_problem
from tests.seldom import seldom
from tests.triton_repo.load.fake_server import Fake, address, serving
from triton_repo.load import load as calling
from triton_repo.load import process
from triton_repo.load.connection import Address
from triton_repo.load.load import GeneratorError, examine, load_test
from triton_repo.load.settings import Load

ROWS = [f"{'x' * (7 * index)}{index}" for index in range(10)]


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 50), st.integers(0, 9))
def test_every_row_comes_once_in_a_round(rows, k, count, seed):
    found = process.drawn(count, [10] * rows, Load(concurrency=1, rows=k, seed=seed))
    assert len(found) == min(count, -(-rows // k))
    assert {len(request) for request in found} == {k}
    sent = [row for request in found for row in request]
    assert len(set(sent[:rows])) == min(rows, len(sent)), "no row twice before each was sent once"
    if count * k >= rows:
        assert set(sent) == set(range(rows))
    assert found == process.drawn(count, [10] * rows, Load(concurrency=1, rows=k, seed=seed))


def test_large_data_are_sent_in_part_at_random(monkeypatch):
    monkeypatch.setattr(process, "MOST_PREPARED_BYTES", 1000)
    sizes = [10] * 5000
    sent = [row for (row,) in process.drawn(10**6, sizes, Load(concurrency=1))]
    assert 100 <= len(sent) == len(set(sent)) <= 101
    assert max(sent) > 2500, "not the first ones"
    assert process.drawn(5, [10**9], Load(concurrency=1)) == [[0]]


def test_the_selector_is_woken_by_files_and_does_not_wait_longer_than_asked():
    loop = asyncio.SelectorEventLoop(process.PreciseSelector())
    read, write = os.pipe()
    got = []
    try:
        loop.add_reader(read, lambda: got.append(os.read(read, 1)))
        loop.call_later(0.01, os.write, write, b"x")
        begun = time.monotonic()
        loop.run_until_complete(asyncio.wait_for(asyncio.sleep(0.05), 20))
        assert 0.05 <= time.monotonic() - begun < 5
        assert got == [b"x"]
        begun = time.perf_counter()
        assert process.PreciseSelector().select(0.0003) == []
        assert time.perf_counter() - begun >= 0.0003
    finally:
        loop.close()
        os.close(read)
        os.close(write)


@pytest.mark.whole
@pytest.mark.parametrize("protocol", seldom(["grpc", "http"], ["http"]))  # test_connection asks over both
def test_a_load_from_a_process_of_its_own(protocol):
    """Both loops, two rows in a request; every row of the data arrives."""
    said = []
    with serving(Fake()) as fake:
        server = Address(protocol, address(fake, protocol))
        model = examine(server)
        loads = [Load(rate=60.0, seconds=0.5, rows=2, seed=3), Load(concurrency=3, seconds=0.5, rows=2)]
        opened, closed = load_test(server, model, ROWS, loads, said.append)
    assert said == [opened, closed]
    assert (opened["loop"], opened["rate"], opened["rows"], opened["model"], opened["prepared"]) == ("open", 60.0, 2, "m", 5)
    assert opened["n"] == len(process.poisson(60.0, 0.5, 3)) == opened["answered"]
    assert (closed["loop"], closed["concurrency"], closed["answered"]) == ("closed", 3, closed["n"])
    assert opened["row_bytes"] == {"p50": 36, "p90": 64, "max": 64}
    assert 0 < opened["cpu_share"] < 2
    assert opened["latency_ms"]["p50"] > 0
    got = [tuple(request["TEXT"]) for request in fake.requests]
    assert {len(rows) for rows in got} == {2}
    assert {row.decode() for rows in got for row in rows} == set(ROWS)


@pytest.mark.usefixtures("generator_inside")
def test_what_goes_wrong_is_one_line(tmp_path, monkeypatch):
    with serving(Fake()) as fake:
        server = Address("grpc", fake.grpc_address)
        model = examine(server, "m")
        with pytest.raises(InputError, match=r"^--model n: grpc://.* has no such model; ready: m$"):
            examine(server, "n")
        with raises_problem("--model m", "first request, of 1 rows", "the word was invalid"):
            load_test(server, model, ["invalid"], [Load(concurrency=1)])
        with raises_problem("--rate 0.001", "no request", "0.1 s", "give more seconds"):
            load_test(server, model, ["a"], [Load(rate=0.001, seconds=0.1)])
        with pytest.raises(InputError, match="the rows are encoded images"):
            load_test(server, model, [b"a"], [Load(concurrency=1)])
    monkeypatch.setattr(calling, "spawn", lambda command, **how: spawned([command[0], "-c", "raise SystemExit('gone: why')"], **how))
    with pytest.raises(GeneratorError, match=r"^the load generator exited with status 1: gone: why$"):
        examine(server)


spawned = calling.spawn


@pytest.mark.usefixtures("generator_inside")
def test_errors_and_shed_requests_are_in_the_figures():
    """A slow row holds its place until the time limit, so that a bound of one request sheds what is due meanwhile."""
    rows = ["fine", "slow", "exhausted", "internal"]
    with serving(Fake()) as fake:
        server = Address("grpc", fake.grpc_address)
        seed = next(s for s in range(99) if process.drawn(4, [4, 4, 9, 8], Load(concurrency=1, seed=s))[0] == [0])
        load = Load(rate=100.0, seconds=0.9, timeout_s=0.3, outstanding=1, seed=seed)
        (found,) = load_test(server, examine(server), rows, [load])
    errors = {kind: about["n"] for kind, about in found["errors"].items()}
    assert all(errors.values()), errors
    assert found["shed"] > 20
    assert found["n"] == found["answered"] + found["shed"] + sum(errors.values()) == len(process.poisson(100.0, 0.9, seed))
    assert found["errors"]["timed_out"]["p50"] >= 290
    assert found["errors"]["refused"]["first"] == "the word was exhausted"
    assert found["latency_of_all_ms"]["p90"] is None
    assert np.isfinite(found["latency_ms"]["max"])
