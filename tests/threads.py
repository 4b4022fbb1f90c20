"""Processes of torch.distributed as threads of one process: collectives are real, and nothing is started."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def together(processes: int, run: Callable[[int], Any]) -> list[Any]:
    """Returns what `run` gives for each rank; all run at once, and meet in the collectives of the default group.

    Raises:
        BaseException: The first that a thread raised.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    store, found, raised = dist.HashStore(), [None] * processes, list[BaseException]()

    def one(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=processes, store=store)
            found[rank] = run(rank)
        except BaseException as error:
            raised.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    isolate(True)
    threaded._install_threaded_pg()
    try:
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threaded._uninstall_threaded_pg()
        isolate(False)
    if raised:
        raise raised[0]
    return found
