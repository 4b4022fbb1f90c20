"""Threads that an engine lets in between two steps."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

from triton_repo.generation.served import guests
from triton_repo.generation.served.guests import TURN_SECONDS, Guests


class Clock:
    """Moves while somebody sleeps; after each sleep the others may do something."""

    def __init__(self, others: Callable[[int], None] = lambda turn: None) -> None:
        self.now, self.turns, self._others = 50.0, 0, others

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.turns += 1
        self._others(self.turns)


def let_in(one: Guests, clock: Clock, seconds: float) -> int:
    """Returns how many turns the others had."""
    with mock.patch.object(guests, "time", clock):
        one.let_in(seconds)
    return clock.turns


def test_without_announced_work_the_lock_is_given_away_once() -> None:
    assert let_in(Guests(), Clock(), 1.0) == 1


@pytest.mark.parametrize("turns", [1, 2, 7])
def test_it_is_given_away_until_all_work_is_done(turns: int) -> None:
    one = Guests()
    one.enter()
    one.enter()

    def work(turn: int) -> None:
        if turn in (1, turns):
            one.leave()
        if turn == 1 == turns:
            one.leave()

    assert let_in(one, Clock(work), 1.0) == turns
    assert one.count == 0


def test_work_that_begins_meanwhile_is_waited_for() -> None:
    one = Guests()
    assert let_in(one, Clock(lambda turn: one.enter() if turn == 1 else one.leave() if turn == 4 else None), 1.0) == 4


def test_work_that_does_not_end_holds_up_no_step_for_longer_than_allowed() -> None:
    one, clock = Guests(), Clock()
    one.enter()
    assert let_in(one, clock, 20 * TURN_SECONDS) <= 21
    assert clock.now - 50 < 22 * TURN_SECONDS
    assert clock.turns >= 19
