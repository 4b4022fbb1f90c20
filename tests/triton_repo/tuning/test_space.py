"""The settings that are tried."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from triton_repo.tuning.settings import Tune
from triton_repo.tuning.space import Point, points


@given(st.integers(1, 48), st.integers(1, 64), st.integers(1, 64), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_processes_share_the_threads_of_the_target(cores: int, instances: int, batch: int, rows: int) -> None:
    own = Point(instances, cores, batch, 0)
    found = points(Tune(rows=rows), own, cores)
    assert found[0] == own
    assert len(found) == len(set(found))
    for point in found[1:]:
        assert point.threads == max(1, cores // point.instances)
        assert point.max_batch_size >= rows, "a request has to fit"
        assert point.max_batch_size > 1 or point.max_queue_delay_us == 0, "a batch of one waits for nobody"
    assert {point.instances for point in found[1:]} >= {1, cores} - ({1} if cores == 1 else set())


def test_two_cores() -> None:
    found = points(Tune(max_queue_delay_us=(0, 2000)), Point(1, 2, 8, 0), 2)
    settings_of = [(point.instances, point.threads, point.max_batch_size, point.max_queue_delay_us) for point in found]
    assert settings_of == [
        *((1, 2, 8, 0), (1, 2, 1, 0), (1, 2, 8, 2000), (1, 2, 32, 0), (1, 2, 32, 2000)),
        *((2, 1, 1, 0), (2, 1, 8, 0), (2, 1, 8, 2000), (2, 1, 32, 0), (2, 1, 32, 2000)),
    ]
    given_space = points(Tune(instances=(3,), max_batch_size=(4,), max_queue_delay_us=(0,)), Point(1, 2, 8, 0), 2)
    assert [point.instances for point in given_space] == [1, 3]
