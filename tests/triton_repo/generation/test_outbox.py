"""The threads that talk to the server."""

from __future__ import annotations

import threading

from triton_repo.generation.served.guests import Guests
from triton_repo.generation.served.outbox import Outbox


def test_calls_of_a_lane_are_carried_out_in_their_order_and_nobody_waits_for_them() -> None:
    outbox, go, done = Outbox(Guests()), threading.Event(), list[tuple[int, str]]()

    def hold() -> None:
        go.wait()

    lane = outbox.lane()
    lane.put(hold)
    for number in range(100):
        lane.put(lambda number=number: done.append((number, threading.current_thread().name)))
    assert not done  # the first one holds them up, not whoever puts
    go.set()
    outbox.close()
    assert done == [(number, "responses") for number in range(100)]


def test_a_lane_that_waits_holds_up_no_other() -> None:
    """Each call waits for all: in one lane none of them would end."""
    outbox, together, passed = Outbox(Guests(), 3), threading.Barrier(3), list[int]()

    def call() -> None:
        passed.append(together.wait(30))

    lanes = [outbox.lane() for _ in range(3)]
    assert outbox.lane() is lanes[0], "lanes take turns"
    for lane in lanes:
        lane.put(call)
    outbox.close()
    assert sorted(passed) == [0, 1, 2]


def test_what_waits_in_a_lane_is_a_guest_until_it_is_carried_out() -> None:
    guests, go, begun = Guests(), threading.Event(), threading.Event()
    outbox = Outbox(guests, 2)

    def hold() -> None:
        begun.set()
        go.wait()

    first, second = outbox.lane(), outbox.lane()
    first.put(hold)
    first.put(lambda: None)
    second.put(hold)
    assert guests.count == 3
    begun.wait()
    assert guests.count == 3, "also what is under way"
    go.set()
    outbox.close()
    assert guests.count == 0
