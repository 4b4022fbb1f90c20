"""Serves a language model, compares its tokens with the tokens of the engine, and how it reads text with Transformers; times its answers
next to the engine alone.

Prompts of several lengths are asked at once besides, some longer than what continuous batching reads in one step: prompts of one length
hide where an engine mixes texts up.

Server and engine take turns at the same prompts, so that both see the same machine:

    share of the engine   tokens per second of the server / tokens per second of the engine in a process of its own, both with as many
                          greedy answers of the same length at once
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foundation.artifacts.exported import Build
from foundation.artifacts.figures import Tokens
from foundation.artifacts.triton import Load, TritonModel
from foundation.core.decoding import Decoding
from foundation.measure.engine_process import EngineProcess
from foundation.measure.generation import WARM_UP_TOKENS
from foundation.measure.proposals import Turns
from foundation.measure.tokens import compare_tokens, ended, filled, load_answers, load_mixed_answers, token_shortfall
from foundation.stage.context import Context
from triton_repo.client import ServedWrong
from triton_repo.generation import client
from triton_repo.generation.config import LanguageSettings
from triton_repo.generation.text_check import ANSWER_TOKENS, Reply, check_texts
from triton_repo.layout import Served

CHECKED_AT_ONCE = 8
"""Answers at once while tokens are compared: the batches change with every answer that ends."""
ANSWERS, SECONDS = 200, 10.0
"""A measurement ends with so many answers; none begins after so many seconds."""


def measure(model: Served, settings: LanguageSettings, repository: Path, context: Context, concurrency: Sequence[int]) -> TritonModel:
    """Serves one model alone, compares it with the engine that was evaluated, and times it.

    Args:
        model: The model.
        settings: The settings of its configuration.
        repository: The repository that it is in.
        context: The context of the stage.
        concurrency: Numbers of answers at once at which it is timed; left out, with a warning, where the model takes fewer requests.

    Returns:
        Its entry in triton.json; `n` are compared tokens, `disagreements` answers with another token.

    Raises:
        ServedWrong: The tokens differ, or a text is read otherwise than Transformers reads it.
        RequestError: A request failed.
        ServerError: The server did not start.
        EngineError: The engine alone failed.
    """
    from triton_repo import environment
    from triton_repo.server import TritonServer

    prompts, expected = recorded(model)
    room = settings.max_running + settings.max_waiting
    if max(concurrency) > room:
        context.progress.warn(
            f"{model.name}: not timed at {max(concurrency)} answers at once, since it takes {room} requests; raise triton_repo.max_waiting"
        )
    counts, tokens = [count for count in concurrency if count <= room], expected.shape[1]
    with TritonServer(repository, environment.check(), context.scratch / f"triton-{model.name}.log", models=[model.name]) as server:
        at_once = min(CHECKED_AT_ONCE, room)
        groups = [(prompts, expected), *_mixed(model)]
        ask = partial(client.greedy, server.grpc_address, model.name, request_seconds=settings.request_seconds)
        found = [ask(rows, answers.shape[1], at_once, ends=ended(answers)) for rows, answers in groups]
        with _alone(model, settings, context) as engine:
            compared, *_ = [  # each on its own: few prompts that are all wrong would be lost among many
                compare(model.name, answers, own, None if engine is None else partial(_one_by_one, engine, rows, answers))
                for (rows, answers), own in zip(groups, found, strict=True)
            ]
            texts = _check_texts(server.grpc_address, model, settings, prompts)
            latency = tuple(_timed(server.grpc_address, settings, engine, prompts, tokens, count) for count in counts)
        memory = server.peak_memory_bytes()
    context.progress.log(
        f"  {model.name} in Triton: {compared.identical} of {compared.prompts} answers of {compared.tokens} tokens equal "
        f"the engine, {texts} texts are read as Transformers reads them{_speed(latency)}"
    )
    return model.entry.with_(
        metrics={},
        n=compared.decisions,
        predictions=None,
        disagreements=compared.disagreements,
        tokens=compared,
        texts=texts,
        peak_memory_bytes=memory,
        latency=latency,
    )


def _check_texts(address: str, model: Served, settings: LanguageSettings, rows: Sequence[NDArray[np.int32]]) -> int:
    """Asks texts and conversations; returns how many (`text_check.check_texts`)."""

    def ask(prompt: client.Prompted) -> Reply:
        piece = client.short_answer(address, model.name, prompt, ANSWER_TOKENS)
        return Reply(piece.prompt_tokens or 0, piece.tokens, piece.text)

    decodes = settings.architecture == "decoder"
    most = settings.context - (ANSWER_TOKENS if decodes else 0)
    return check_texts(model.name, model.file.parent, rows, most, chats=decodes, ask=ask)


def recorded(model: Served) -> tuple[list[NDArray[np.int32]], NDArray[np.int32]]:
    """Returns the prompts of the export, int32 [P] each, and the tokens that the engine answered, int32 [n, T]."""
    prompts, tokens = load_answers(_answers(model))
    return list(prompts), tokens


def _answers(model: Served) -> Path:
    """Returns the file with the answers of the engine."""
    generation = model.engine.generation
    assert generation is not None, "engines that are served as language models have answered"
    return model.root / str(generation.file)


def _mixed(model: Served) -> list[tuple[list[NDArray[np.int32]], NDArray[np.int32]]]:
    """Returns prompts of several lengths and the answers of the engine, one group, or none."""
    found = load_mixed_answers(_answers(model))
    return [] if found is None else [found]


@contextmanager
def _alone(model: Served, settings: LanguageSettings, context: Context) -> Iterator[EngineProcess | None]:
    """Opens the engine of a model in a process of its own, with the proposals that it is served with; None outside of a run."""
    if context.engine_job is None:
        yield None
        return
    build = Build(precision=model.precision, float_precision=model.precision, folder=str(model.folder))
    with EngineProcess(context.engine_job(model.root, build, model.engine, bool(settings.proposals))) as engine:
        yield engine


def _timed(
    address: str,
    settings: LanguageSettings,
    engine: EngineProcess | None,
    prompts: Sequence[NDArray[np.int32]],
    tokens: int,
    count: int,
) -> Load:
    """Returns the row of one number of answers at once."""
    ask = partial(client.load, address, settings.name, request_seconds=settings.request_seconds)
    row = ask(prompts, tokens, count, requests=ANSWERS, seconds=SECONDS)
    rate = None if engine is None else engine_rate(engine, prompts, tokens, count)
    return row.with_(engine_tokens_per_s=rate, engine_share=round(row.tokens_per_s / rate, 4) if rate else None)


def engine_rate(engine: EngineProcess, prompts: Sequence[NDArray[np.int32]], tokens: int, count: int) -> float:
    """Returns the tokens per second of an engine that answers so many prompts at once: real prompts in turn, greedy, all of one length."""
    feed, turns = itertools.cycle(prompts), Turns()
    engine.generate(list(itertools.islice(feed, count)), Decoding(max_tokens=WARM_UP_TOKENS, ignore_end=True))
    begun = time.perf_counter()
    while not turns.answers or (len(turns.answers) < ANSWERS and time.perf_counter() < begun + SECONDS):
        turns.take(engine.generate(list(itertools.islice(feed, count)), Decoding(max_tokens=tokens, ignore_end=True)))
    return turns.rate


def _speed(rows: Sequence[Load]) -> str:
    """Returns the first and the last row in words; nothing where none was timed."""
    if not rows:
        return ""
    last = rows[-1]
    beside = "" if last.engine_share is None else f", {last.engine_share:.2f} of the engine alone"
    first = f", first token after {rows[0].first_token_ms.p50:.1f} ms"
    return f"{first}, {last.tokens_per_s:.1f} tokens/s over {last.concurrency}{beside}"


def _one_by_one(engine: EngineProcess, prompts: Sequence[NDArray[np.int32]], expected: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns the greedy answers of an engine that is asked one prompt at a time, int32 [n, T]."""
    tokens = expected.shape[1]
    decoding = Decoding(max_tokens=tokens, ignore_end=not ended(expected))
    return filled([answer.tokens[0] for prompt in prompts for answer in engine.generate([prompt], decoding)], tokens)


def compare(
    name: str,
    expected: NDArray[np.int32],
    answers: NDArray[np.int32],
    one_by_one: Callable[[], NDArray[np.int32]] | None = None,
) -> Tokens:
    """Compares the tokens of a served model with the engine's tokens.

    Args:
        name: Name of the model.
        expected: What the engine answered, int32 [n, T].
        answers: What the server answered.
        one_by_one: Returns the engine's answers to one prompt at a time; called if too many tokens differ. The order of sums is another
            one for a text alone than for several. An engine that rounds its inputs makes other codes of that, and a large model other
            tokens. The server may differ as often as the engine differs from itself.

    Raises:
        ServedWrong: More of them differ than the order of sums in other batches explains; the message names the first.
    """
    compared = compare_tokens(expected, answers)
    reason = token_shortfall(compared, "the evaluated engine")
    if reason is not None and one_by_one is not None:
        own = compare_tokens(expected, one_by_one())["disagreements"]
        if compared["disagreements"] <= own:
            compared["passed"], reason = True, None
        else:
            reason = f"{reason}; asked one prompt at a time, the engine itself differs in {own}"
    if reason is not None:
        row, place = (int(one) for one in np.argwhere(expected != answers)[0])
        told = f"first prompt {row}, token {place}: {answers[row, place]} instead of {expected[row, place]}"
        raise ServedWrong(f"model {name} in Triton: {reason}; {told}")
    return Tokens(**compared)
