"""Rolls a model over to a new version while it answers.

    1   the new version is copied next to the present one             live/<model>/2
    2   it is loaded as a model of its own, which no client knows     live/<model>.<random>
    3   it answers the golden rows                                    `check`; if it fails, it is unloaded and nothing has changed
    4   it is unloaded, and loaded as the version of the model        Triton loads it beside the present one, exchanges the two, and unloads
                                                                      the present one when it has answered what it has

Requests name no version, so Triton exchanges the versions for clients of the front and for its own. Two versions at most are in memory, and
share the processors. A request that names the old version itself fails after 4.

Not here: a part of the requests for the new version, and models that generate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from foundation.core.errors import InputError, Problem, nearest
from triton_repo.config import from_text
from triton_repo.live import CONFIG, Candidate, LiveRepository
from triton_repo.server import ServerError, TritonServer

LOAD_SECONDS = 600.0
Check = Callable[[str, str], None]
"""Called with the address of Triton and the name of the candidate; raises if its answers are not those that were recorded."""


@dataclass(frozen=True)
class Rolled:
    """A model that was rolled over."""

    model: str
    before: str
    after: str
    """The version before and after."""
    load_s: float
    """Seconds until the new version was loaded beside the present one."""
    check_s: float
    seconds: float
    """In all, until the old version had ended."""


def roll_over(triton: TritonServer, live: LiveRepository, model: str, source: Path, check: Check) -> Rolled:
    """Rolls a model over.

    Args:
        triton: The running server.
        live: Its repository.
        model: Name of the model.
        source: The folder of the model in the repository of the new version.
        check: See above.

    Raises:
        InputError: There is no such model, or the new version is no replacement for it.
        ServerError: It was not loaded.
    """
    present, new = configs(live, model, source)
    started, before = time.monotonic(), live.version(model)
    with _staged(triton, live, model, source) as candidate:
        loaded = time.monotonic()
        check(triton.grpc_address, candidate.name)
        checked = time.monotonic()
    live.take(candidate, new)
    try:
        triton.load(model, LOAD_SECONDS)
    except BaseException:
        live.keep(model, before, present)
        with suppress(ServerError):  # the server died; it is started again with the version before
            triton.load(model, LOAD_SECONDS)
            triton.watch(model, before, instances(present))
        live.remove(model, candidate.version)
        raise
    live.route(model, candidate.version, new)
    triton.watch(model, candidate.version, instances(new))
    live.remove(model, before)
    return Rolled(model, before, candidate.version, loaded - started, checked - loaded, time.monotonic() - started)


@contextmanager
def _staged(triton: TritonServer, live: LiveRepository, model: str, source: Path) -> Iterator[Candidate]:
    """Loads the new version as a model of its own, and unloads it; deletes the version if the block fails.

    Raises:
        ServerError: It was not loaded, or not unloaded.
    """
    candidate = live.stage(model, source)
    try:
        triton.load(candidate.name, LOAD_SECONDS)
        yield candidate
        triton.unload(candidate.name)
    except BaseException:
        with suppress(ServerError):  # it was not loaded, or the server died
            triton.unload(candidate.name)
        live.remove(model, candidate.version)
        raise
    finally:
        live.unstage(candidate)


def configs(live: LiveRepository, model: str, source: Path) -> tuple[pb.ModelConfig, pb.ModelConfig]:
    """Returns the present configuration of a model and the configuration of the new version, which fit each other.

    Raises:
        InputError: There is no such model, or clients of the present version could not talk to the new one.
    """
    if model not in live.names:
        raise InputError(f"model {model}", "not served here", f"{', '.join(live.names)} is{nearest(model, live.names)}")
    present, new = live.config(model), from_text((source / CONFIG).read_text(encoding="utf-8"))
    problems = [Problem(f"model {model}", line, remedy="serve it under another name") for line in differences(present, new)]
    if problems:
        raise InputError.of(problems)
    return present, new


def instances(config: pb.ModelConfig) -> int:
    """Returns the number of processes of a model."""
    return sum(max(1, group.count) for group in config.instance_group) or 1


def differences(present: pb.ModelConfig, new: pb.ModelConfig) -> Iterator[str]:
    """Yields a line for each reason for which clients of a model could not talk to a new version of it.

    Args:
        present: Its `ModelConfig`.
        new: The configuration of the new version.
    """
    if present.model_transaction_policy.decoupled or new.model_transaction_policy.decoupled:
        yield "models that generate are not rolled over"
    for side in ("input", "output"):
        before, after = ({one.name: (one.data_type, tuple(one.dims)) for one in getattr(config, side)} for config in (present, new))
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                yield f"{side} {name} is not the same in the new version"
    if new.max_batch_size < present.max_batch_size:
        yield f"the new version takes {new.max_batch_size} rows in a request, the present one {present.max_batch_size}"
