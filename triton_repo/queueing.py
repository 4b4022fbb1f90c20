"""The queue of a served model: how many requests may be under way, how long an answer may take, and who comes first.

    - triton_repo: {queue: {max_requests: 64, timeout_ms: 200, priorities: 2}}

The limits are in `config.pbtxt` as Triton's own queue policy, so they hold wherever the repository is served. Triton heeds the time-out
of a request only where the queue has one of its own: without a limit the queue gets `UNLIMITED_MS`. Behind `compress serve` the front
applies the limits too, before a request reaches Triton: it also refuses at once what would wait longer than its time-out
(`triton_repo.front.admission`). Triton itself finds that out only when the time is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from foundation.core.config import Config

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as pb

MOST_REQUESTS, MOST_TIMEOUT_MS, MOST_PRIORITIES = 100_000, 3_600_000.0, 16
UNLIMITED_MS = 24 * MOST_TIMEOUT_MS
"""Time-out in `config.pbtxt` of a queue without one."""


class Queue(Config):
    """Limits of the queue of a model."""

    max_requests: Annotated[int, Field(ge=1, le=MOST_REQUESTS)] | None = None
    """Most requests under way, waiting or being answered; a further one is refused at once. null: no limit."""
    timeout_ms: Annotated[float, Field(ge=1, le=MOST_TIMEOUT_MS)] | None = None
    """Most milliseconds for an answer. What would take longer is refused. A request may ask for less with its parameter `timeout`, in
    microseconds. null: no limit."""
    priorities: Annotated[int, Field(ge=1, le=MOST_PRIORITIES)] = 1
    """Levels of priority. A request names its level with its parameter `priority`; 1 is served first, and the last level is the default."""


def write_policy(config: pb.ModelConfig, queue: Queue) -> None:
    """Puts the limits into the dynamic batching of a `ModelConfig`."""
    batching = config.dynamic_batching
    if queue.priorities > 1:
        batching.priority_levels, batching.default_priority_level = queue.priorities, queue.priorities
    policy = batching.default_queue_policy
    policy.max_queue_size = queue.max_requests or 0
    policy.timeout_action = policy.REJECT
    policy.default_timeout_microseconds = round(1e3 * (queue.timeout_ms or UNLIMITED_MS))
    policy.allow_timeout_override = True


def read_policy(config: pb.ModelConfig) -> Queue:
    """Returns the limits in a `ModelConfig`."""
    batching = config.dynamic_batching
    policy = batching.default_queue_policy
    timeout_ms = policy.default_timeout_microseconds / 1e3
    return Queue(
        max_requests=policy.max_queue_size or None,
        timeout_ms=timeout_ms if 0 < timeout_ms < UNLIMITED_MS else None,
        priorities=batching.priority_levels or 1,
    )
