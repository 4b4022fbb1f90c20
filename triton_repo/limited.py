"""Latency through the server at the shapes that `goals.max_latency_ms` limits.

request   `batch` synthetic rows that just fill `sequence` tokens (samples of sounds; pictures of the size that the model reads), so that
          they cost what the engine is timed with at this shape
load      one request under way: what is added is preparing rows, the server, and the way there and back
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foundation.artifacts.triton import Limit
from foundation.core.goals import LatencyGoal
from foundation.standalone.adapted import with_adapter
from foundation.standalone.preprocess import Preprocessor, Row
from foundation.standalone.windows import Window
from triton_repo import client
from triton_repo.layout import SHORT, row_of_length

if TYPE_CHECKING:
    from triton_repo.layout import Served
    from triton_repo.server import TritonServer

QUESTION = SHORT["QUESTION"].decode()
Shape = tuple[int, int | None]


def shapes_of(limits: Sequence[LatencyGoal]) -> list[Shape]:
    """Returns the shapes (batch, sequence) that goals limit, each once, in their order."""
    return list(dict.fromkeys((limit.batch, limit.sequence) for limit in limits))


def measure_limits(server: TritonServer, model: Served, shapes: Sequence[Shape], pairs: bool, most: int) -> tuple[Limit, ...]:
    """Times one model of a running server at each shape.

    Args:
        server: The server.
        model: The model.
        shapes: (batch, sequence) each.
        pairs: Whether rows are pairs of texts.
        most: Most rows of a request.

    Returns:
        The latency at each shape that the model has, or why it was not measured.

    Raises:
        RequestError: A request failed.
    """
    found = []
    for batch, sequence in shapes:
        if model.tower is not None and (model.tower == "image") != (sequence is None):
            continue
        if batch > most:
            limit = Limit(reason=f"requests have at most {most} rows (max_batch_size)")
        else:
            limit = client.batch_latency(
                server.grpc_address, model.name, [row_of(model.prepared, sequence, pairs)] * batch, processes=server.processes
            )
        found.append(limit.with_(batch=batch, sequence=sequence))
    return tuple(found)


def row_of(prepared: Preprocessor, sequence: int | None, pairs: bool) -> Row:
    """Returns a synthetic row of a length."""
    made = row_of_length(prepared, sequence, pairs)
    if prepared.steps is not None or prepared.sounds is not None:
        return made
    text = made.decode("utf-8")
    if prepared.finds_spans:
        return Window(QUESTION, text, 0, 0)  # the server divides the context itself
    row = (text, "") if pairs else text
    return with_adapter(row, prepared.adapters[0]) if prepared.adapters else row
