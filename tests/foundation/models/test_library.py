from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from foundation.models.library import quiet, uninitialized

DRAW = nn.init.kaiming_uniform_


def test_layers_get_no_values_inside() -> None:
    with uninitialized():
        assert nn.init.kaiming_uniform_ is not DRAW
        weight = torch.full((3, 3), 7.0)
        nn.init.ones_(weight)
    assert weight.eq(7).all()
    assert nn.init.ones_(weight).eq(1).all()


@pytest.mark.parametrize("first", [0, 1])
def test_threads_enter_and_leave_in_any_order(first: int) -> None:
    entered, leave = threading.Barrier(3, timeout=20), [threading.Event(), threading.Event()]
    inside: list[bool] = []

    def work(own: int) -> None:
        with uninitialized():
            entered.wait()
            leave[own].wait(20)
            inside.append(nn.init.kaiming_uniform_ is not DRAW)

    threads = [threading.Thread(target=work, args=(each,)) for each in (0, 1)]
    for each in threads:
        each.start()
    entered.wait()
    for own in (first, 1 - first):
        leave[own].set()
        threads[own].join(20)
    assert inside == [True, True]
    assert nn.init.kaiming_uniform_ is DRAW


def test_an_error_inside_does_not_hold_it() -> None:
    from transformers import PreTrainedModel

    stock = PreTrainedModel.init_weights
    with pytest.raises(ZeroDivisionError), uninitialized(), uninitialized():
        raise ZeroDivisionError
    assert nn.init.kaiming_uniform_ is DRAW
    assert PreTrainedModel.init_weights is stock


def test_inside_quiet_there_are_errors_alone_and_outside_what_there_was() -> None:
    from transformers.utils import logging

    found = logging.get_verbosity()
    try:
        for level in (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
            logging.set_verbosity(level)
            with quiet():
                assert logging.get_verbosity() == max(level, logging.ERROR)
                with quiet():
                    assert logging.get_verbosity() == max(level, logging.ERROR)
                assert not logging.is_progress_bar_enabled()
            assert logging.get_verbosity() == level
    finally:
        logging.set_verbosity(found)
