"""Compares the language models of a run with what a user would reach for instead: perplexity, answers, tokens per second.

    compress run RECIPE --out RUN          with target.engines [openvino_genai, onnxruntime_decoder] and export {variants: all}
    python benchmarks/generation.py RUN [--streams 1 8] [--prompt-tokens 32] [--out FOLDER]

Peers, built from the baseline of the run by `generation_peers.py`: OpenVINO GenAI with the weights compressed by NNCF to int8 and int4, in
the same settings as ours; ONNX Runtime GenAI in fp32 and int4; CTranslate2 in float32 and int8. Every engine has its own process, and the
processes take turns (foundation/measure/generation.py). Perplexity is over the evaluation blocks of the run; "as torch" is the share of
equal tokens in greedy answers of 64 tokens to the starts of 32 of these blocks. Prints a table and writes `generation.json` with hardware,
versions, n and percentiles.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import generation_peers

from compress.reading.load import load_data
from compress.recipe import Recipe, check
from compress.report import evaluations
from compress.run.bandwidth import read_bandwidth
from export.choices import Generation
from export.engines.openvino import GROUP
from export.engines.openvino_genai import CACHE
from export.engines.spec import EngineSpec, spec_of
from export.generation.agreement import answer
from export.generation.fused_folder import reads_of
from export.generation.prompts import Prompts, greedy
from export.generation.reads import reads_per_token
from foundation.artifacts.graph import Graph
from foundation.artifacts.run_folder import Run, open_run
from foundation.core.engines import ENGINES
from foundation.core.progress import ConsoleProgress
from foundation.data.splits import Split
from foundation.labels.tasks import Task
from foundation.machine.environment import fingerprint
from foundation.measure.engine_process import EngineProcess, write_rows
from foundation.measure.generation import TOKENS, Reads, Workload, measure_generation
from foundation.measure.metrics import metrics
from foundation.measure.tokens import compare_tokens
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.stage.context import Job

GENAI = "openvino_genai"
ASKED = Generation(prompts=32, tokens=64)
BATCH_SIZE = 4
"""Blocks that are scored at once."""


def main() -> None:
    """Builds the peers, asks all engines, prints."""
    arguments = parse()
    run = open_run(arguments.run)
    recipe = check(run.recipe)
    specs = ours(run, recipe)
    jobs: dict[str, Job] = {
        **specs,
        **with_nncf(specs, arguments.out),
        **generation_peers.jobs(baseline(run), arguments.out, recipe.target.num_threads),
    }
    progress, bandwidth = ConsoleProgress(), read_bandwidth(recipe.target.num_threads)
    vocabulary = Checkpoint(baseline(run)).config.vocab_size
    loads = [Workload(length, streams, TOKENS) for length in arguments.prompt_tokens for streams in arguments.streams]
    rows = measure_generation(list(jobs.values()), [reads(job) for job in jobs.values()], loads, vocabulary, bandwidth, progress)
    document = {
        "environment": fingerprint(),
        "bandwidth_bytes_per_s": bandwidth,
        "answers": {} if arguments.speed_only else answers(jobs, run, recipe),
        "speed": [{"name": list(jobs)[job], **row.written()} for job, row in rows],
    }
    (arguments.out / "generation.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(document, loads))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="prompts that are asked at once")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[32], help="tokens of a prompt")
    parser.add_argument("--speed-only", action="store_true", help="neither perplexity nor answers: for random weights")
    parser.add_argument("--out", type=Path, default=Path("runs/generation-peers"), help="where the peers are built, once")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


def baseline(run: Run) -> Path:
    """Returns the checkpoint that all variants were made of."""
    return next(iter(run.variants.values())).path


def ours(run: Run, recipe: Recipe) -> dict[str, EngineSpec]:
    """Returns the engines of the run that answer prompts, by the name they have in the table."""
    exported = run.of_kind("engine")
    assert exported is not None, "the run exports"
    found = {}
    for build in evaluations.exported(run).builds:
        for entry in build.engines:
            if entry.runnable and ENGINES[entry.engine].generates:
                name = f"ours, {ENGINES[entry.engine].title}: {build.variant}, {build.precision}" + (
                    " (rest bf16)" * (entry.float_precision != build.float_precision)
                )
                found[name] = spec_of(exported.path, build, entry, recipe.target)
    return found


def with_nncf(specs: Mapping[str, EngineSpec], out: Path) -> dict[str, EngineSpec]:
    """Returns the fp32 engine of the run with its weights compressed by NNCF; settings as ours, but it may quantize tokens by itself."""
    floating = next(spec for spec in specs.values() if (spec.engine, spec.precision) == (GENAI, "fp32"))
    properties = {name: value for name, value in floating.properties.items() if name != GROUP}
    found = {}
    for name, settings in generation_peers.NNCF.items():
        compress = partial(generation_peers.nncf_weights, Path(floating.path).parent, settings=settings)
        folder = generation_peers.built(out / name.replace(",", "").replace(" ", "-").lower(), compress)
        found[name] = replace(floating, path=str(folder / generation_peers.MODEL), properties=properties)
    return found


def reads(job: Job) -> Reads:
    """Returns what an engine reads for a token; nothing where its files are not ours."""
    if not isinstance(job, EngineSpec):
        return Reads(0, 0)
    if job.engine != GENAI:
        return Reads(**reads_of(Graph(Path(job.path))))
    cache = next(name for name, told in CACHE.items() if told == job.properties["KV_CACHE_PRECISION"])
    return Reads(**reads_per_token(Path(job.path), job.float_precision, cache))


def answers(jobs: Mapping[str, Job], run: Run, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Returns perplexity and agreement with torch of every engine."""
    evaluation = load_data(recipe.data, recipe.model.task, None, print, str(baseline(run))).evaluation
    prompts = Prompts.of_rows(evaluation.rows, ASKED, recipe.data.max_length)
    expected, found = greedy(load_float(baseline(run)), prompts), {}
    for name, job in jobs.items():
        with EngineProcess(job) as process:
            compared = compare_tokens(expected, answer(process, prompts))
            found[name] = {"perplexity": perplexity(process, evaluation, recipe.model.task), **compared}
        print(f"{name}: perplexity {found[name]['perplexity']:.3f}, {compared['equal_share']:.1%} of the tokens of torch")
    return found


def perplexity(process: EngineProcess, evaluation: Split, task: Task) -> float:
    """Returns the perplexity of an open engine over blocks of token ids."""
    if isinstance(process.job, EngineSpec):
        return metrics(task, process.predict(evaluation.rows, BATCH_SIZE), evaluation.labels)["perplexity"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.safetensors")
        write_rows(path, evaluation.rows)
        scored = process.ask("score", rows=str(path))
    return math.exp(scored["nll"] / scored["tokens"])


def table(document: Mapping[str, Any], loads: Sequence[Workload]) -> str:
    """Returns the result as a Markdown table: perplexity, equal tokens, then for each load ms per token and tokens per second."""
    speed = {(row["name"], row["prompt_tokens"], row["streams"]): row for row in document["speed"]}
    heads = [f"{load.streams} x {load.prompt_tokens}: ms per token p50 / p90 / p99, tokens/s" for load in loads]
    lines = [f"| engine | perplexity | as torch | {' | '.join(heads)} | bandwidth |", "| --- " * (len(loads) + 4) + "|"]
    for name in dict.fromkeys(row["name"] for row in document["speed"]):
        told = document["answers"].get(name)
        quality = f"{told['perplexity']:.3f} | {told['equal_share']:.1%}" if told else " | "
        mine = [speed[name, load.prompt_tokens, load.streams] for load in loads]
        cells = [
            " / ".join("-" if row["token_ms"][p] is None else f"{row['token_ms'][p]:.1f}" for p in ("p50", "p90", "p99")) for row in mine
        ]
        cells = [f"{cell}, {row['tokens_per_s']:.1f}" for cell, row in zip(cells, mine, strict=True)]
        share = next((row["bandwidth_share"] for row in mine if row["bandwidth_share"]), None)
        lines.append(f"| {name} | {quality} | {' | '.join(cells)} | {'' if share is None else f'{share:.0%}'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
