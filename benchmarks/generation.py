"""Compares the language models of a run with what a user would reach for instead: perplexity, answers, tokens per second.

    compress run RECIPE --out RUN
    python benchmarks/generation.py RUN [--streams 1 8] [--prompt-tokens 32] [--llama-cpp ENVIRONMENT/bin/python] [--out FOLDER]

Ours are the engines that the run exported (target.engines [openvino_genai, onnxruntime_decoder], export {variants: all}). Of a run without
an export stage, the engines are written here (`parts/generation_engines.py`), without the gates of an export: perplexity and answers are
measured below.

Peers, built from the baseline of the run by `generation_peers.py` and `parts/llama_cpp_engine.py`: OpenVINO GenAI with the weights
compressed by NNCF to int8 and int4, in the same settings as ours; ONNX Runtime GenAI in fp32 and int4; CTranslate2 in float32 and int8;
llama.cpp in F16, Q4_0, Q4_K_M, IQ4_NL and Q8_0, with flash attention. Every engine has its own process, and the processes take turns
(foundation/measure/generation.py). On a machine that is quiet for minutes at a time, a few turns a call are added up (`--turns 1 --add`).

Perplexity is over the evaluation blocks of the run, each read by itself, of all tokens but the first of a block. torch and llama.cpp in F16
must agree within `SAME`. "As torch" is the share of equal tokens in greedy answers to starts of blocks, or to questions. Tokens per second
include the reading of the prompt. A ratio is formed within a turn, with its 95 % interval over the turns (foundation/measure/turns.py).
Prints tables and writes `generation.json` with hardware, versions, n and percentiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import generation_peers
import numpy as np

from compress.reading.load import load_data
from compress.recipe import Recipe, check
from compress.report import evaluations
from compress.run.bandwidth import read_bandwidth
from export.choices import Generation
from export.engines.openvino import GROUP
from export.engines.openvino_genai import CACHE
from export.engines.registry import engine_module
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
from foundation.measure.generation import TOKENS, TURNS, Cell, Reads, Workload, measure_cells
from foundation.measure.metrics import metrics
from foundation.measure.predictions import predict
from foundation.measure.tokens import compare_tokens
from foundation.measure.turns import half_width
from foundation.models.checkpoint import load_float
from foundation.models.config import most_tokens
from foundation.models.folder import Checkpoint
from foundation.models.inputs.questions import read_questions
from foundation.stage.context import Job
from foundation.standalone.onnx_decoder import INVARIANT
from parts import llama_cpp_engine
from parts.generation_engines import built_here

Cells = dict[Workload, list[Cell]]
GENAI, WRITTEN = "openvino_genai", "generation.json"
ASKED = Generation(prompts=32, tokens=64)
BATCH_SIZE = 4
"""Blocks that are scored at once."""
SAME = 1e-3
"""Largest relative difference of the perplexities of torch and of llama.cpp in F16."""
PEERS = ("nncf", *generation_peers.LIBRARIES)
TORCH, REFERENCE = "torch, fp32", f"llama.cpp {llama_cpp_engine.FLOAT}"


def main() -> None:
    """Builds the peers, asks all engines, prints."""
    arguments = parse()
    run = open_run(arguments.run)
    recipe = check(run.recipe)
    jobs = {name: job for name, job in all_jobs(run, recipe, arguments).items() if any(part in name for part in arguments.only)}
    bandwidth = read_bandwidth(recipe.target.num_threads)
    loads = [Workload(length, streams, TOKENS) for length in arguments.prompt_tokens for streams in arguments.streams]
    document: dict[str, Any] = {"environment": fingerprint(), "bandwidth_bytes_per_s": bandwidth}
    document["answers"] = {} if arguments.speed_only else answers(jobs, run, recipe, arguments)
    vocabulary = Checkpoint(baseline(run)).config.vocab_size
    cells = measured(jobs, loads, vocabulary, arguments) if arguments.turns else {}
    document["speed"] = [
        {"name": name, "samples": asdict(cells[load][place]), **cells[load][place].row(job, load, reads(job), bandwidth).written()}
        for place, (name, job) in enumerate(jobs.items())
        for load in cells
    ]
    (arguments.out / WRITTEN).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(document, list(cells), list(jobs)))
    for load in cells:
        print(ratios(list(jobs), load, cells[load]))
    require_same(document["answers"])


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="prompts that are asked at once")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[32], help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=TURNS, help="fewest turns of a load; 0: no speeds")
    parser.add_argument("--add", action="store_true", help="that many turns, which are added to those of an earlier call in --out")
    parser.add_argument("--speed-only", action="store_true", help="neither perplexity nor answers: for random weights")
    parser.add_argument("--blocks", type=int, help="evaluation blocks that are scored; all by default")
    parser.add_argument("--prompts", type=int, default=ASKED.prompts, help="prompts whose answers are compared with torch; 0: none")
    parser.add_argument("--answer-tokens", type=int, default=ASKED.tokens, help="tokens of these answers")
    parser.add_argument("--questions", type=Path, metavar="FILE", help="questions, one a line, in place of those prompts")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, help="libraries to compare with, besides llama.cpp")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--batch-invariant", action="store_true", help="our engines once more, with that setting where they have it")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="engines with one of these in their names")
    parser.add_argument("--out", type=Path, default=Path("runs/generation-peers"), help="where the peers are built, once")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


def measured(jobs: Mapping[str, Job], loads: Sequence[Workload], vocabulary: int, arguments: argparse.Namespace) -> Cells:
    """Returns the samples of every engine under every load, those of earlier calls included where they are added to."""
    turns = arguments.turns if arguments.add else None
    cells = measure_cells(
        list(jobs.values()), loads, vocabulary, ConsoleProgress(), lambda load: max(arguments.turns, load.turns) if turns is None else turns
    )
    earlier = arguments.out / WRITTEN
    if not (arguments.add and earlier.is_file()):
        return cells
    rows = json.loads(earlier.read_text(encoding="utf-8"))["speed"]
    known = {(row["name"], row["prompt_tokens"], row["streams"]): Cell(**row["samples"]) for row in rows}
    return {
        load: [known.get((name, load.prompt_tokens, load.streams), Cell()) + cell for name, cell in zip(jobs, row, strict=True)]
        for load, row in cells.items()
    }


def all_jobs(run: Run, recipe: Recipe, arguments: argparse.Namespace) -> dict[str, Job]:
    """Returns our engines and the peers, by the name they have in the table."""
    specs, threads, out = ours(run, recipe, arguments.out), recipe.target.num_threads, arguments.out
    jobs: dict[str, Job] = dict(specs)
    if arguments.batch_invariant:
        able = {name: spec for name, spec in specs.items() if engine_module(spec.engine).batch_invariant()}
        jobs |= {f"{name}, batch invariant": replace(spec, properties={**spec.properties, INVARIANT: "1"}) for name, spec in able.items()}
    if "nncf" in arguments.peers and any(spec.engine == GENAI for spec in specs.values()):
        jobs |= with_nncf(specs, out)
    jobs |= generation_peers.jobs(baseline(run), out, threads, arguments.peers)
    if arguments.llama_cpp is not None:
        jobs |= llama_cpp_engine.jobs(baseline(run), out, arguments.llama_cpp, threads)
    return jobs


def baseline(run: Run) -> Path:
    """Returns the checkpoint that all variants were made of."""
    return next(iter(run.variants.values())).path


def ours(run: Run, recipe: Recipe, out: Path) -> dict[str, EngineSpec]:
    """Returns the engines of the run that answer prompts, by the name they have in the table; written here if the run exported none."""
    exported = run.of_kind("engine")
    if exported is None:
        return {f"ours, {ENGINES[spec.engine].title}: {variant}, {spec.precision}": spec for variant, spec in built_here(run, recipe, out)}
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


def answers(jobs: Mapping[str, Job], run: Run, recipe: Recipe, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns perplexity and agreement with torch of every engine, and of torch itself in fp32."""
    evaluation = load_data(recipe.data, recipe.model.task, None, print, str(baseline(run))).evaluation
    evaluation = evaluation.take(range(len(evaluation))[: arguments.blocks])
    prompts, model = asked_prompts(evaluation, run, recipe, arguments), load_float(baseline(run))
    expected = None if prompts is None else greedy(model, prompts)
    preprocessor = Checkpoint(baseline(run)).preprocessor(recipe.model.task, recipe.data.max_length, recipe.target)
    own = metrics(recipe.model.task, predict(model, preprocessor, evaluation.rows, BATCH_SIZE), evaluation.labels)["perplexity"]
    print(f"{TORCH}: perplexity {own:.4f}, n = {evaluation.labels.count()}", flush=True)
    found: dict[str, dict[str, Any]] = {TORCH: {"perplexity": own, "n": evaluation.labels.count()}}
    for name, job in jobs.items():
        with EngineProcess(job) as process:
            compared = {} if prompts is None else compare_tokens(expected, answer(process, prompts))
            told = {"perplexity": perplexity(process, evaluation, recipe.model.task), "versions": process.versions, **compared}
        found[name] = told
        equal = f", {told['equal_share']:.1%} of the tokens of torch" if compared else ""
        print(f"{name}: perplexity {told['perplexity']:.4f}{equal}", flush=True)
    return found


def asked_prompts(evaluation: Split, run: Run, recipe: Recipe, arguments: argparse.Namespace) -> Prompts | None:
    """Returns the prompts whose answers are compared with torch: starts of blocks, or questions; answers go on after an end token."""
    if not arguments.prompts:
        return None
    asked = ASKED.model_copy(update={"prompts": arguments.prompts, "tokens": arguments.answer_tokens})
    if arguments.questions is None:
        return Prompts.of_rows(evaluation.rows, asked, recipe.data.max_length)
    checkpoint = Checkpoint(baseline(run))
    questions = read_questions(str(arguments.questions), "--questions")
    return replace(Prompts.of_questions(questions, asked, checkpoint, most_tokens(checkpoint.config)), questions=False)


def perplexity(process: EngineProcess, evaluation: Split, task: Task) -> float:
    """Returns the perplexity of an open engine over blocks of token ids."""
    if isinstance(process.job, EngineSpec):
        return metrics(task, process.predict(evaluation.rows, BATCH_SIZE), evaluation.labels)["perplexity"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.safetensors")
        write_rows(path, evaluation.rows)
        scored = process.ask("score", rows=str(path))
    return math.exp(scored["nll"] / scored["tokens"])


def require_same(answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises where llama.cpp in F16 has another perplexity than torch: then the definitions differ, or the files."""
    if REFERENCE not in answers:
        return
    apart = answers[REFERENCE]["perplexity"] / answers[TORCH]["perplexity"] - 1
    print(f"{REFERENCE} against {TORCH}: perplexity {apart:+.2e}; at most {SAME:g} apart is required")
    if abs(apart) > SAME:
        raise SystemExit("the perplexities are not comparable")


def table(document: Mapping[str, Any], loads: Sequence[Workload], names: Sequence[str]) -> str:
    """Returns the result as a Markdown table: perplexity, equal tokens, then for each load ms per token and tokens per second."""
    speed = {(row["name"], row["prompt_tokens"], row["streams"]): row for row in document["speed"]}
    told = "first token p50 ms, ms per token p50 / p90 / p99, tokens/s"
    heads = [f"{load.streams} x {load.prompt_tokens}: {told}" for load in loads]
    lines = [f"| {' | '.join(['engine', 'perplexity', 'as torch', *heads, 'bandwidth'])} |", "| --- " * (len(loads) + 4) + "|"]
    for name in names:
        quality = document["answers"].get(name, {})
        mine = [speed[name, load.prompt_tokens, load.streams] for load in loads]
        share = next((row["bandwidth_share"] for row in mine if row["bandwidth_share"]), None)
        cells = [
            name,
            f"{quality['perplexity']:.3f}" if quality else "",
            f"{quality['equal_share']:.1%}" if "equal_share" in quality else "",
            *(spoken(row) for row in mine),
            "" if share is None else f"{share:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spoken(row: Mapping[str, Any]) -> str:
    """Returns the cell of one engine under one load."""
    between = " / ".join("-" if row["token_ms"][p] is None else f"{row['token_ms'][p]:.1f}" for p in ("p50", "p90", "p99"))
    return f"{row['first_token_ms']['p50']:.0f}, {between}, {row['tokens_per_s']:.1f}"


def ratios(names: Sequence[str], load: Workload, cells: Sequence[Cell]) -> str:
    """Returns tokens per second of ours over those of each peer, as a Markdown table: the mean within turns and its 95 % interval."""
    mine = [place for place, name in enumerate(names) if name.startswith("ours")]
    theirs = [place for place, name in enumerate(names) if not name.startswith("ours")]
    heads = [f"{load.streams} x {load.prompt_tokens}, {len(cells[0].rates)} turns", *(names[place] for place in theirs)]
    lines = ["", f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    found = {(one, other): interval(cells[one].rates, cells[other].rates) for one, other in itertools.product(mine, theirs)}
    lines += [f"| {' | '.join([names[one], *(found[one, other] for other in theirs)])} |" for one in mine]
    return "\n".join(lines)


def interval(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Returns the mean ratio of two engines within turns and its 95 % interval."""
    logarithms = np.log(np.array(ours) / np.array(theirs)).tolist()
    mean, half = float(np.mean(logarithms)), half_width(logarithms)
    value, low, high = (math.exp(mean + shift) for shift in (0.0, -half, half))
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
