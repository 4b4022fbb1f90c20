"""What happens between two machines during a training: each case, and what was seen."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file

import cli
from foundation.machine import lifeline, parallel
from foundation.training.train import TrainConfig
from tests.nodes import Node, Nodes, small_disk, two_nodes, until

Launcher = Literal["torchrun", "variables"]
RECIPE = """
name: tiny
model:
  config: {model_type: vit, image_size: 8, patch_size: 4, num_channels: 1, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2,
    intermediate_size: 64}
  init: random
  task: image-classification
  head: new
data: {path: "sklearn:digits"}
stages:
  - finetune: {epochs: EPOCHS, learning_rate: 1.0e-3, batch_size: 16, keep: last}
"""
OFTEN_S = 0.5
"""Seconds between two checkpoints."""
SLOWEST_S = 900.0
"""Most seconds that any case waits: a machine of tests may have much else to do."""


@dataclass(frozen=True)
class Setup:
    """How cases are run."""

    folder: Path
    """New folder for all cases."""
    lost_s: int = 60
    join_s: float = 600.0
    epochs: int = 3

    def start(self, nodes: Nodes, node: Node, out: Path, launcher: Launcher = "variables", restarts: int = 0, apart_s: float = 0.0) -> None:
        """Starts or goes on with the run in folder `out` in one process of a node.

        Args:
            nodes: Both nodes.
            node: One of them.
            out: The run folder.
            launcher: What starts the process.
            restarts: Restarts of torchrun.
            apart_s: Seconds by which the clock of the node is ahead.
        """
        arguments = (_run, self, out, apart_s)
        if launcher == "torchrun":
            nodes.torchrun(node, *arguments, restarts=restarts, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=str(int(restarts > 0)))
        else:
            nodes.by_variables(node, *arguments)


def _run(setup: Setup, out: Path, apart_s: float) -> None:
    """What one process does: the command `compress run`."""
    recipe = out.with_suffix(f".{os.environ['RANK']}.yaml")
    recipe.write_text(RECIPE.replace("EPOCHS", str(setup.epochs)))
    TrainConfig.model_fields["checkpoint_seconds"].default = OFTEN_S
    TrainConfig.model_rebuild(force=True)
    lifeline.LOST_S, lifeline.JOIN_S, parallel.JOIN_S = setup.lost_s, setup.join_s, setup.join_s
    if apart_s:
        now, now_ns = time.time, time.time_ns
        time.time, time.time_ns = lambda: now() + apart_s, lambda: now_ns() + int(apart_s * 1e9)
    sys.argv = ["compress", "run", str(recipe), "--out", str(out)]
    cli.app()


@dataclass
class Seen:
    """What was seen in a case."""

    seconds: float = 0.0
    """From the failure until all processes had ended, or until one was named."""
    lines: Mapping[str, list[str]] = field(default_factory=dict)
    """Lines about the failure, by host."""
    goes_on: bool = False
    """Whether the same command went on from a checkpoint afterwards."""
    equal: bool | None = None
    """Whether it came to the bits of a run that nothing disturbed; None where that was not compared."""


def checkpoints(out: Path) -> list[Path]:
    """Returns the checkpoints of trainings in a run folder."""
    return [path for path in out.glob("stages/.*/training") if (path / "state.json").exists()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Returns the result of the training."""
    found: dict[str, torch.Tensor] = load_file(next(out.glob("stages/finetune-*/model.safetensors")))
    return found


def finished(*nodes: Node) -> Callable[[], bool]:
    """Returns whether all processes of nodes have ended, as a function."""
    return lambda: all(node.ended() for node in nodes)


def about(node: Node, *words: str) -> list[str]:
    """Returns the lines of a node with one of some words."""
    return [line for line in node.text().splitlines() if any(word in line for word in words)]


def undisturbed(setup: Setup) -> Path:
    """Runs without a failure; returns the run folder."""
    out = setup.folder / "whole"
    with two_nodes(setup.folder / "whole-nodes") as nodes:
        for node in (nodes.a, nodes.b):
            setup.start(nodes, node, out)
        until(finished(nodes.a, nodes.b), SLOWEST_S, "the run ends")
        assert weights(out), nodes.a.text()
    return out


@contextmanager
def training(setup: Setup, name: str, launcher: Launcher = "variables", restarts: int = 0) -> Iterator[tuple[Nodes, Path]]:
    """Gives two nodes in the middle of a training, some checkpoints after its start."""
    out = setup.folder / name
    with two_nodes(setup.folder / f"{name}-nodes") as nodes:
        for node in (nodes.a, nodes.b):
            setup.start(nodes, node, out, launcher, restarts)
        until(lambda: checkpoints(out) or nodes.a.ended(), SLOWEST_S, "a checkpoint")
        time.sleep(3 * OFTEN_S)
        assert not nodes.a.ended(), nodes.a.text()
        yield nodes, out


def continued(setup: Setup, nodes: Nodes, out: Path, whole: Path | None, seen: Seen, launcher: Launcher = "variables") -> Seen:
    """Runs the same command again on both nodes."""
    for node in (nodes.a, nodes.b):
        node.running.clear()
        setup.start(nodes, node, out, launcher)
    until(finished(nodes.a, nodes.b), SLOWEST_S, "the run goes on")
    return compared(nodes, out, whole, seen)


def compared(nodes: Nodes, out: Path, whole: Path | None, seen: Seen) -> Seen:
    """Notes whether a run went on, and to which bits."""
    seen.goes_on = bool(about(nodes.a, "resumed after step")) and any(out.glob("stages/finetune-*/model.safetensors"))
    if whole is not None and seen.goes_on:
        one, other = weights(whole), weights(out)
        seen.equal = one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
    return seen


def killed(setup: Setup, whole: Path | None, first: bool = False) -> Seen:
    """Kills all processes of a node, of the first one or of the other, and starts both again."""
    with training(setup, f"killed-{'a' if first else 'b'}") as (nodes, out):
        victim, other = (nodes.a, nodes.b) if first else (nodes.b, nodes.a)
        victim.kill()
        seconds = until(finished(other), SLOWEST_S, "the other node ends")
        return continued(setup, nodes, out, whole, Seen(seconds, {other.host: about(other, "gone", "rror")}))


def returned(setup: Setup, whole: Path | None) -> Seen:
    """Kills a node under torchrun with restarts: the other waits at the rendezvous, and goes on as soon as the node is back."""
    with training(setup, "returned", "torchrun", restarts=2) as (nodes, out):
        nodes.b.kill()
        seconds = until(lambda: about(nodes.a, "gone"), SLOWEST_S, "the other node notices")
        time.sleep(2)
        assert not nodes.a.ended(), nodes.a.text()
        lines = {nodes.a.host: about(nodes.a, "gone")}
        nodes.b.running.clear()
        setup.start(nodes, nodes.b, out, "torchrun", restarts=2)
        until(finished(nodes.a, nodes.b), SLOWEST_S, "both go on")
        return compared(nodes, out, whole, Seen(seconds, lines))


def cut(setup: Setup, whole: Path | None) -> Seen:
    """Cuts the link for good; joins it after all processes have ended, and starts both again."""
    with training(setup, "cut") as (nodes, out):
        nodes.cable(plugged=False)
        seconds = until(finished(nodes.a, nodes.b), SLOWEST_S, "both nodes end")
        nodes.cable(plugged=True)
        seen = Seen(seconds, {node.host: about(node, "gone", "rror") for node in (nodes.a, nodes.b)})
        return continued(setup, nodes, out, whole, seen)


def blinked(setup: Setup, whole: Path | None) -> Seen:
    """Cuts the link for a third of the time after which a machine is gone: the training goes on."""
    with training(setup, "blinked") as (nodes, out):
        nodes.cable(plugged=False)
        time.sleep(setup.lost_s / 3)
        nodes.cable(plugged=True)
        seconds = until(finished(nodes.a, nodes.b), SLOWEST_S, "the run ends")
        seen = Seen(seconds, {node.host: about(node, "gone", "rror") for node in (nodes.a, nodes.b)})
        seen.goes_on, one, other = True, weights(whole) if whole else {}, weights(out)
        seen.equal = all(torch.equal(value, other[name]) for name, value in one.items())
        return seen


def slow(setup: Setup, stopped_s: float = 0.3, every_s: float = 0.4) -> Seen:
    """Stops the processes of a node for a part of the time, until they are named."""
    done = threading.Event()

    def stop(node: Node) -> None:
        while not done.is_set():
            node.signal(signal.SIGSTOP)
            time.sleep(stopped_s)
            node.signal(signal.SIGCONT)
            done.wait(every_s - stopped_s)

    with training(setup, "slow") as (nodes, out):
        stopping = threading.Thread(target=stop, args=(nodes.b,))
        stopping.start()
        try:
            seconds = until(lambda: "times as long" in (out / "log.txt").read_text() or nodes.a.ended(), SLOWEST_S, "it is named")
        finally:
            done.set()
            stopping.join()
        named = [line.partition(" ")[2] for line in (out / "log.txt").read_text().splitlines() if "times as long" in line]
        return Seen(seconds, {nodes.a.host: named})


def stopped(setup: Setup) -> Seen:
    """Stops the processes of a node altogether, until they are named."""
    with training(setup, "stopped") as (nodes, out):
        nodes.b.signal(signal.SIGSTOP)
        seconds = until(lambda: "has not reported" in (out / "log.txt").read_text(), SLOWEST_S, "it is named")
        named = [line.partition(" ")[2] for line in (out / "log.txt").read_text().splitlines() if "has not reported" in line]
        return Seen(seconds, {nodes.a.host: named})


def full(setup: Setup, whole: Path | None) -> Seen:
    """Fills the disk of the run folder; makes room again, and starts both again."""
    out = setup.folder / "full"
    with small_disk(out, 8), training(setup, "full") as (nodes, _):
        before = checkpoints(out)[0].joinpath("state.json").stat().st_mtime_ns
        with (out / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
            while ballast.write(bytes(4096)):
                pass
        seconds = until(finished(nodes.a, nodes.b), SLOWEST_S, "both nodes end")
        seen = Seen(seconds, {node.host: about(node, "No space", "gone", "rror") for node in (nodes.a, nodes.b)})
        assert checkpoints(out)[0].joinpath("state.json").stat().st_mtime_ns >= before
        (out / "ballast").unlink()
        return continued(setup, nodes, out, whole, seen)


def apart(setup: Setup, whole: Path, apart_s: float) -> Seen:
    """Runs with a clock that is hours ahead on one node."""
    out = setup.folder / f"apart{apart_s:+.0f}"
    with two_nodes(setup.folder / f"{out.name}-nodes") as nodes:
        for node in (nodes.a, nodes.b):
            setup.start(nodes, node, out, apart_s=apart_s if node is nodes.b else 0.0)
        seconds = until(finished(nodes.a, nodes.b), SLOWEST_S, "the run ends")
        seen = Seen(seconds, {node.host: about(node, "gone", "rror:", "warning: ") for node in (nodes.a, nodes.b)}, goes_on=True)
        one, other = weights(whole), weights(out)
        seen.equal = all(torch.equal(value, other[name]) for name, value in one.items())
        return seen


def missing(setup: Setup, first: bool) -> Seen:
    """Starts only one of two nodes: the first one or the other."""
    out = setup.folder / f"missing-{'b' if first else 'a'}"
    with two_nodes(setup.folder / f"{out.name}-nodes") as nodes:
        node = nodes.a if first else nodes.b
        setup.start(nodes, node, out)
        seconds = until(finished(node), SLOWEST_S, "it ends")
        seen = Seen(seconds, {node.host: about(node, "processes came", "did not come", "rror")})
        assert not out.exists(), sorted(out.rglob("*"))
        return seen
