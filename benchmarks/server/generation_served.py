"""A language model of a run behind Triton against its engine alone: tokens per second for the same questions, in turns.

    compress run RECIPE --out RUN          a language model, up to the stage triton_repo
    python benchmarks/server/generation_served.py RUN [--model NAME] [--streams 1 8] [--tokens 48] [--questions FILE] [--turns 3]

The engine alone answers as many questions at once as there are streams, in its own process; the server has as many clients, each with one
question at a time. Client and server share the processors, tokenizer and network are part of the server's time. Answers go on past end
tokens, so that all have the same length; both sides read the same token ids. Prints a row for each number of streams, and JSON with
hardware, versions and percentiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.recipe import check
from compress.report import evaluations
from export.engines.spec import EngineSpec, spec_of
from export.generation.questions import prompts_of, read_questions
from foundation.artifacts.artifact import read_json
from foundation.artifacts.run_folder import Run, open_run
from foundation.artifacts.triton import Load
from foundation.core.decoding import Decoding
from foundation.machine.environment import fingerprint
from foundation.measure.engine_process import EngineProcess
from foundation.models.folder import Checkpoint
from triton_repo import environment
from triton_repo.generation.client import load
from triton_repo.server import TritonServer
from triton_repo.triton_repo import REPOSITORY, RESULTS

Prompts = Sequence[NDArray[np.int32]]


def main() -> None:
    """Asks both sides in turns, prints."""
    arguments = parse()
    run = open_run(arguments.run)
    served = run.of_kind("model_repository")
    assert served is not None, f"{arguments.run}: has no model repository"
    entries = {entry["model"]: entry for entry in read_json(served.path / RESULTS)["models"]}
    entry = entries[arguments.model or next(iter(entries))]
    checkpoint = run.variants[entry["variant"]].path
    prompts = prompts_of(Checkpoint(checkpoint), read_questions(str(arguments.questions)), arguments.tokens, None)
    cells: dict[int, dict[str, list[Any]]] = {streams: {"alone": [], "served": []} for streams in arguments.streams}
    with (
        tempfile.TemporaryDirectory() as folder,
        TritonServer(served.path / REPOSITORY, environment.check(), Path(folder, "log"), models=[entry["model"]]) as server,
        EngineProcess(spec(run, entry)) as process,
    ):
        for streams, turn in itertools.product(arguments.streams, range(-1, arguments.turns)):  # the first one warms up
            alone_s = alone(process, prompts, streams, arguments.tokens)
            found = load(server.grpc_address, entry["model"], prompts, arguments.tokens, streams, requests=len(prompts), seconds=1e6)
            if turn >= 0:
                cells[streams]["alone"].append(len(prompts) * arguments.tokens / alone_s)
                cells[streams]["served"].append(found)
    print(f"{entry['model']}: {entry['engine']}, n = {len(prompts)} questions of {arguments.tokens} tokens, {arguments.turns} turns")
    for streams, cell in cells.items():
        shares = [row.tokens_per_s / own for own, row in zip(cell["alone"], cell["served"], strict=True)]
        rates = [row.tokens_per_s for row in cell["served"]]
        last = cell["served"][-1]
        print(
            f"{streams} streams: alone {np.median(cell['alone']):.1f} tokens/s, behind Triton {np.median(rates):.1f}; "
            f"share {min(shares):.3f} to {max(shares):.3f}; first token {last.first_token_ms.written()}, token {last.token_ms.written()}"
        )
    print(json.dumps({"environment": fingerprint(), "entry": entry["model"], "cells": cells}, default=Load.written))


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
