"""What is sampled beside a load: python -m pytest tests/benchmarks/test_served_model.py"""

import threading

import psutil

from benchmarks.server.parts.served_model import sampled


def test_a_short_load_is_sampled_at_its_start_and_at_its_end():
    values = iter([3.0, 5.0])
    with sampled(lambda: {"model": next(values)}, every_s=100.0) as samples:
        assert [one["model"] for one in samples] == [3.0]
    assert [one["model"] for one in samples] == [3.0, 5.0]
    assert 0.0 == samples[0]["s"] <= samples[1]["s"]


def test_a_long_one_is_sampled_between_too_and_a_death_ends_nothing():
    taken, many = [], threading.Event()

    def sample():
        taken.append(0.0)
        if len(taken) == 2:
            raise psutil.NoSuchProcess(1)
        if len(taken) > 3:
            many.set()
        return {"model": float(len(taken))}

    with sampled(sample, every_s=0.01) as samples:
        assert many.wait(60)
    assert [one["model"] for one in samples] == [1.0, *(float(number) for number in range(3, len(taken) + 1))]
