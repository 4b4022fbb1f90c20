"""A language model of a run behind `compress serve` against its engine alone: tokens per second for the same questions, in turns.

    compress run RECIPE --out RUN          a language model with a chat template, up to the stage triton_repo
    python benchmarks/server/generation_served.py RUN --questions FILE [--model NAME] [--streams 1 8] [--tokens 48] [--turns 3]

    alone    the engine in its own process, which answers as many questions at once as there are streams
    Triton   over gRPC at Triton's own socket: as many clients, each with one question at a time, as token ids
    front    the same at the socket of the front
    chat     `/v1/chat/completions` over HTTP, as events: questions in, texts out

Clients and server share the processors; tokenizer and network are part of the server's time. Answers go on past end tokens, so that all
have the same length, and every side reads the same tokens. Prints a row for each number of streams and side, and JSON with hardware,
versions and percentiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.recipe import check
from compress.report import evaluations
from export.engines.spec import EngineSpec, spec_of
from export.generation.questions import prompts_of
from foundation.artifacts.artifact import read_json
from foundation.artifacts.run_folder import Run, open_run
from foundation.artifacts.triton import Load
from foundation.core.decoding import Decoding
from foundation.machine.environment import fingerprint
from foundation.measure.engine_process import EngineProcess
from foundation.models.folder import Checkpoint
from foundation.models.inputs.questions import read_questions
from parts.chat_load import chat_load
from triton_repo import environment
from triton_repo.generation.client import load
from triton_repo.served_models import ServedModel
from triton_repo.service import Service
from triton_repo.triton_repo import REPOSITORY, RESULTS

Prompts = Sequence[NDArray[np.int32]]
SIDES = ("Triton", "front", "chat")


def main() -> None:
    """Asks all sides in turns, prints."""
    arguments = parse()
    run = open_run(arguments.run)
    served = run.of_kind("model_repository")
    assert served is not None, f"{arguments.run}: has no model repository"
    entries = {entry["model"]: entry for entry in read_json(served.path / RESULTS)["models"]}
    entry = entries[arguments.model or next(iter(entries))]
    name, questions = entry["model"], read_questions(str(arguments.questions), "--questions")
    prompts = prompts_of(Checkpoint(run.variants[entry["variant"]].path), questions, arguments.tokens, None)
    cells = {streams: {"alone": list[float](), "served": {side: list[Load]() for side in SIDES}} for streams in arguments.streams}
    with (
        tempfile.TemporaryDirectory() as folder,
        Service(served.path / REPOSITORY, environment.check(), Path(folder, "log"), models=[ServedModel(name, name, name, "")]) as server,
        EngineProcess(spec(run, entry)) as process,
    ):
        asks = asking(server, name, prompts, questions, arguments.tokens)
        for streams, turn in itertools.product(arguments.streams, range(-1, arguments.turns)):  # the first one warms up
            alone_s = alone(process, prompts, streams, arguments.tokens)
            found = {side: ask(streams) for side, ask in (asks.items() if turn % 2 else reversed(asks.items()))}
            if turn >= 0:
                cells[streams]["alone"].append(len(prompts) * arguments.tokens / alone_s)
                for side, figures in found.items():
                    cells[streams]["served"][side].append(figures)
    print(f"{name}: {entry['engine']}, n = {len(prompts)} questions of {arguments.tokens} tokens, {arguments.turns} turns")
    for streams, cell in cells.items():
        print(f"{streams} streams, alone: {np.median(cell['alone']):.1f} tokens/s")
        for side, turns in cell["served"].items():
            print(f"{streams} streams, {side}: {row(turns, cell['alone'])}")
    print(json.dumps({"environment": fingerprint(), "entry": name, "cells": cells}, default=Load.written))


def asking(server: Service, model: str, prompts: Prompts, questions: Sequence[str], tokens: int) -> dict[str, Callable[[int], Load]]:
    """Returns what asks each side of the server all questions, so many at once."""
    triton = server._triton
    assert triton is not None, "it runs"
    more = {"requests": len(prompts), "seconds": 1e6}
    return {
        "Triton": lambda streams: load(triton.grpc_address, model, prompts, tokens, streams, **more),
        "front": lambda streams: load(server.grpc_address, model, prompts, tokens, streams, **more),
        "chat": lambda streams: chat_load(server.http_address, model, questions, tokens, streams),
    }


def row(turns: Sequence[Load], own: Sequence[float]) -> str:
    """Returns the figures of a side: the median of the turns, and its share of the engine within each turn."""
    shares = [one.tokens_per_s / alone for alone, one in zip(own, turns, strict=True)]
    times = f"first token {turns[-1].first_token_ms.written()}, token {turns[-1].token_ms.written()}"
    share = f"{np.median(shares):.3f} of it ({min(shares):.3f} to {max(shares):.3f})"
    return f"{np.median([one.tokens_per_s for one in turns]):.1f} tokens/s, {share}; {times}"


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run")
    parser.add_argument("--model", help="a model of its repository; the first one where absent")
    parser.add_argument("--questions", type=Path, required=True, help="a text file with one question a line")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="questions that are asked at once")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--turns", type=int, default=3, help="turns that are measured")
    return parser.parse_args()


def spec(run: Run, entry: dict[str, Any]) -> EngineSpec:
    """Returns the engine that a model of the repository is served by."""
    exported = run.of_kind("engine")
    assert exported is not None, "the run exports"
    names = ("engine", "mode", "float_precision")
    (found,) = (
        spec_of(exported.path, build, engine, check(run.recipe).target)
        for build in evaluations.exported(run).builds
        for engine in build.engines
        if (build.variant, build.precision) == (entry["variant"], entry["precision"])
        and all(getattr(engine, name) == entry[name] for name in names)
    )
    return found


def alone(process: EngineProcess, prompts: Prompts, streams: int, tokens: int) -> float:
    """Returns the seconds that an engine takes for all prompts, so many at once."""
    started = time.perf_counter()
    for first in range(0, len(prompts), streams):
        process.generate(list(prompts[first : first + streams]), Decoding(max_tokens=tokens, ignore_end=True))
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
