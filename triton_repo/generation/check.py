"""Serves a language model, compares its tokens with those of the engine, and times its answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.measure.tokens import compare_tokens, ended, load_answers, token_shortfall
from compress.stage.context import Context
from triton_repo.client import ServedWrong
from triton_repo.generation import client
from triton_repo.layout import Served

CHECKED_PROMPTS = 64
CHECKED_AT_ONCE = 8
"""Answers at once while tokens are compared: the batches change with every answer that ends."""


def measure(model: Served, repository: Path, context: Context, concurrency: Sequence[int]) -> dict[str, Any]:
    """Serves one model alone, compares it with the engine that was evaluated, and times it.

    Args:
        model: The model.
        repository: The repository that it is in.
        context: That of the stage.
        concurrency: Numbers of answers at once at which it is timed.

    Returns:
        `n` (compared tokens), `disagreements` (answers with another token), `tokens` (see `compare_tokens`), `latency` (see `client.load`).

    Raises:
        ServedWrong: The tokens differ.
        RequestError: A request failed.
        ServerError: The server did not start.
    """
    from triton_repo import environment
    from triton_repo.server import TritonServer

    prompts, expected = recorded(model)
    with TritonServer(repository, environment.check(), context.scratch / f"triton-{model.name}.log", models=[model.name]) as server:
        found = client.greedy(server.grpc_address, model.name, prompts, expected.shape[1], CHECKED_AT_ONCE, ends=ended(expected))
        compared = compare(model.name, expected, found)
        latency = [client.load(server.grpc_address, model.name, prompts, expected.shape[1], count) for count in concurrency]
    context.progress.log(
        f"  {model.name} in Triton: {compared['identical']} of {compared['prompts']} answers of {compared['tokens']} tokens are those of "
        f"the engine, first token after {latency[0]['first_token_ms']['p50']:.1f} ms, {latency[-1]['tokens_per_s']:.1f} tokens/s over "
        f"{latency[-1]['concurrency']}"
    )
    return {"n": compared["decisions"], "disagreements": compared["disagreements"], "tokens": compared, "latency": latency}


def recorded(model: Served) -> tuple[list[NDArray[np.int32]], NDArray[np.int32]]:
    """Returns some prompts, int32 [P] each, and the tokens that the engine answered at the export, int32 [n, T]."""
    prompts, tokens = load_answers(model.root / model.engine["generation"]["file"])
    chosen = np.linspace(0, len(prompts) - 1, min(CHECKED_PROMPTS, len(prompts))).round().astype(np.int64)
    return [prompts[index] for index in chosen], tokens[chosen]


def compare(name: str, expected: NDArray[np.int32], found: NDArray[np.int32]) -> dict[str, Any]:
    """Compares the tokens of a served model with those of the engine.

    Raises:
        ServedWrong: More of them differ than the order of sums in other batches explains; the message names the first.
    """
    compared = compare_tokens(expected, found)
    reason = token_shortfall(compared, "the evaluated engine")
    if reason is not None:
        row, place = (int(one) for one in np.argwhere(expected != found)[0])
        told = f"first prompt {row}, token {place}: {found[row, place]} instead of {expected[row, place]}"
        raise ServedWrong(f"model {name} in Triton: {reason}; {told}")
    return compared
