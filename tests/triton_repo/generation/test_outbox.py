"""The thread that talks to the server."""

from __future__ import annotations

import threading

from triton_repo.generation.served.outbox import Outbox


def test_calls_are_carried_out_in_their_order_and_nobody_waits_for_them():
    outbox, go, done = Outbox(), threading.Event(), []
    outbox.put(go.wait)
    for number in range(100):
        outbox.put(lambda number=number: done.append((number, threading.current_thread().name)))
    assert not done  # the first one holds them up, not whoever puts
    go.set()
    outbox.close()
    assert done == [(number, "responses") for number in range(100)]
