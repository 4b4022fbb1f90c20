"""Memory of training a large language model: what each process holds, against what `plan` predicts.

    python benchmarks/large_training.py [--billions 1] [--methods finetune lora qat] [--processes 2] [--rows 4] [--tokens 64] [--steps 2]
        [--checkpointing full] [--context 1] [--optimizer adamw] [--out FOLDER]

Writes a Llama of random bfloat16 weights (`large_model.py`), and trains it: several processes, which torchrun starts, under FSDP2 with
offload; one process alone holds all of it. `--context N`: processes share the tokens of each row.

    finetune   every weight
    lora       finetune with adapters of rank 16 on all layers of the blocks
    qat        quantize, w8a8, every weight and scale

Each process reads RssAnon of /proc/self/status, what it holds that is no file, every 10 ms: growth since its imports, at its peak while the
model is loaded, while it trains, and while the result is gathered. The prediction is that of `plan --devices` for device and host together,
which are one memory there. On a GPU the peaks are those of tensors on the device, and so is the prediction. Prints a Markdown table, MiB.

glibc keeps small tensors that are freed for itself; `MALLOC_MMAP_THRESHOLD_=262144` in the environment takes that out of the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from large_model import MIB, anonymous, sizes_of, write_model

SECONDS_BETWEEN = 0.01
METHODS = ("finetune", "lora", "qat")
PHASES = ("load", "train", "gather")
COLUMNS = (
    "method",
    "parameters, billions",
    "processes",
    "predicted",
    *(f"{phase}, peak" for phase in PHASES),
    "measured / predicted",
    "s/step",
)


class Watch:
    """The most that this process holds in each phase, beyond what it held at the start; sampled by a thread."""

    def __init__(self) -> None:
        import torch

        self.base, self.phase, self.cuda = anonymous("self"), PHASES[0], torch.cuda.is_available()
        self.peaks = dict.fromkeys((*PHASES, "end"), 0)
        if not self.cuda:
            threading.Thread(target=self._sample, daemon=True).start()

    def enter(self, phase: str) -> None:
        """Begins a phase; the last one is over."""
        import torch

        if self.cuda:
            self.peaks[self.phase] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        self.phase = phase

    def _sample(self) -> None:
        while True:
            self.peaks[self.phase] = max(self.peaks[self.phase], anonymous("self") - self.base)
            time.sleep(SECONDS_BETWEEN)


def stage_of(method: str, rows: int, optimizer: str) -> Any:
    """Returns the stage of a method."""
    from foundation.training.finetune import Finetune
    from quantize.quantize import Quantize

    settings: dict[str, Any] = {"epochs": 1, "batch_size": rows, "keep": "last", "learning_rate": 1e-5, "optimizer": {"name": optimizer}}
    if method != "qat":
        return Finetune(**settings, lora={"rank": 16} if method == "lora" else None)
    return Quantize(mode="qat", qat=settings, calibration={"rows": rows, "method": "minmax"}, smoothquant=False)


@dataclass(frozen=True)
class Given:
    """What the trainings of a table have in common."""

    checkpointing: Any
    optimizer: str
    rows: int
    tokens: int
    steps: int
    context: int

    @classmethod
    def of(cls, checkpointing: str, optimizer: str, *sizes: str) -> Given:
        """Returns what a command line says."""
        return cls(checkpointing, optimizer, *map(int, sizes))


def train_here(folder: Path, out: Path, method: str, given: Given) -> None:
    """What every process does: imports, trains, writes what it held into `out`."""
    import numpy as np
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  # what is imported on first use is no growth

    from foundation.artifacts.artifact import Artifact
    from foundation.core.progress import ConsoleProgress
    from foundation.core.target import Parallel, Target
    from foundation.data.splits import Data, Split
    from foundation.labels.next_token import labels_of
    from foundation.machine.parallel import joined
    from foundation.stage.context import Context
    from foundation.training import train

    random, rows, tokens = np.random.default_rng(0), given.rows, given.tokens
    vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    blocks = [random.integers(0, vocabulary, tokens).astype(np.int32) for _ in range(rows * given.steps)]
    splits = [Split(list(part), labels_of(part, tokens - 1)) for part in (blocks, blocks[:1])]
    data = Data(splits[0], splits[1], splits[1], ())
    with joined() as first:
        several = first.size > 1
        parallel = Parallel(
            strategy="fsdp2" if several else "ddp", offload=several, checkpointing=given.checkpointing, context=given.context
        )
        team = parallel.of(first)
        watch, run, finish = Watch(), train._Loop.run, train._Loop.finish
        seconds = [0.0]

        def running(self: Any, *arguments: Any) -> None:
            watch.enter("train")
            began = time.monotonic()
            run(self, *arguments)
            seconds[0] = (time.monotonic() - began) / self.num_steps

        def finishing(self: Any) -> Any:
            watch.enter("gather")
            return finish(self)

        train._Loop.run, train._Loop.finish = running, finishing  # type: ignore[method-assign]
        mine = out / str(team.rank)
        mine.mkdir()
        parent = Artifact(folder, {"id": "baseline", "stage": "model", "digest": "0" * 64})
        made = Context(
            *("text-generation", data, tokens, Target(sequence_lengths=(tokens,)), 0, ConsoleProgress("quiet"), mine / "scratch"),
            checkpoints={"baseline": parent},
            teachers=(parent,),
            team=team,
            parallel=parallel,
        )
        stage_of(method, rows, given.optimizer).run(parent, made, mine / "made")
        watch.enter("end")
        (out / f"{team.rank}.json").write_text(json.dumps({**watch.peaks, "seconds": seconds[0], "threads": torch.get_num_threads()}))


def predicted(folder: Path, method: str, arguments: argparse.Namespace) -> int:
    """Returns the bytes that `plan --devices` expects of each process, on its device, and in the memory of its host where that is one."""
    import torch
    from transformers import AutoConfig

    from compress.devices.trained import Training, needed
    from foundation.machine.device import computing_device
    from foundation.training.precision import autocast_dtype
    from quantize.training.planned import int8_layers

    stage, config, several = (
        stage_of(method, arguments.rows, arguments.optimizer),
        AutoConfig.from_pretrained(folder),
        arguments.processes > 1,
    )
    half = autocast_dtype(computing_device()) == torch.bfloat16
    taken = needed(
        Training(
            *(config, "text-generation", arguments.rows, None, arguments.tokens),
            teacher=config if method == "qat" else None,
            keeps_best=False,
            half=half,
            strategy="fsdp2" if several else "ddp",
            checkpointing=arguments.checkpointing,
            context=arguments.context,
            optimizer=arguments.optimizer,
            offload=several,
            lora=getattr(stage, "lora", None),
            **({"changes": int8_layers(stage.qat, stage.exclude), "soft_weight": stage.qat.soft_weight} if method == "qat" else {}),
        ),
        arguments.processes,
    )
    return taken.peak + (0 if torch.cuda.is_available() else taken.host)


def measure(folder: Path, method: str, arguments: argparse.Namespace) -> list[Mapping[str, Any]]:
    """Trains in processes of torchrun; returns what each held."""
    out = folder.with_name(f"{folder.name}-{method}")
    out.mkdir()
    given = [str(getattr(arguments, each.name)) for each in fields(Given)]
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={arguments.processes}", "--standalone"]
    environment = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // arguments.processes)), **os.environ}
    subprocess.run([*launch, __file__, "--child", str(folder), str(out), method, *given], check=True, env=environment)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(arguments.processes)]


def row_of(method: str, parameters: int, expected: int, found: list[Mapping[str, Any]]) -> str:
    """Returns a row of the table: of each figure that of the process with most."""
    peaks = {phase: max(each[phase] for each in found) for phase in PHASES}
    figures = " | ".join(f"{value / MIB:,.0f}" for value in (expected, *peaks.values()))
    seconds = max(each["seconds"] for each in found)
    return f"| {method} | {parameters / 1e9:.2f} | {len(found)} | {figures} | {peaks['train'] / expected:.2f} | {seconds:.1f} |"


def main() -> None:
    """Writes the model, trains it by every method, prints the table."""
    if sys.argv[1:2] == ["--child"]:
        folder, out, method, *given = sys.argv[2:]
        train_here(Path(folder), Path(out), method, Given.of(*given))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--billions", type=float, default=1, help="parameters, in billions")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="how to train")
    parser.add_argument("--processes", type=int, default=2, help="processes")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step, over all processes")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=2, help="steps")
    parser.add_argument("--checkpointing", choices=("none", "selective", "full", "int8"), default="full", help="activation checkpointing")
    parser.add_argument("--context", type=int, default=1, help="processes that share the tokens of each row")
    parser.add_argument("--optimizer", choices=("adamw", "adamw8bit", "adafactor", "lamb", "lars"), default="adamw", help="the optimizer")
    parser.add_argument("--out", type=Path, help="folder for the models; a temporary one where absent")
    arguments = parser.parse_args()
    sizes = sizes_of(arguments.billions * 1e9)
    with tempfile.TemporaryDirectory(prefix="large-training-", dir=arguments.out) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        write_model(folder, sizes)
        parameters = sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 2
        print(f"{sizes}; {arguments.rows} rows of {arguments.tokens} tokens, {arguments.steps} steps; MiB\n")
        print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
        for method in arguments.methods:
            expected = predicted(folder, method, arguments)
            print(row_of(method, parameters, expected, measure(folder, method, arguments)), flush=True)


if __name__ == "__main__":
    main()
