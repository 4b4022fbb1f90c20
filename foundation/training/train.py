"""The training loop of finetuning, distillation, recovery after pruning and quantization-aware training.

An objective returns the loss terms of every row of a batch; the loop sums them, divides by the rows of the whole batch and steps:

    loss = 1/B sum_b sum_terms term_b        so micro-batches change nothing but rounding
    w   <- AdamW(w, clip(grad, max_norm), lr(t))       decoupled decay (https://arxiv.org/abs/1711.05101), none for biases and norms
    lr(t) = peak * min(1, (t + 1) / warmup) during warm-up, then linear or half a cosine down to 0

Rows are tokenized once. An epoch shuffles them, sorts windows of 50 batches by length and shuffles the batches of each window, so that the
rows of a batch have similar lengths and need little padding. All randomness comes from (seed, epoch) or from generators whose state is
saved with the weights (`foundation.training.state`): on the same hardware and number of threads a resumed run reaches bit-identical
weights. Several processes split each batch, and also the model if it is too large for one (`foundation.machine.parallel`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.core.progress import Progress
from foundation.core.target import Parallel
from foundation.data.splits import Split
from foundation.machine.parallel import ALONE, Team
from foundation.machine.process import return_memory_if_short
from foundation.machine.random_state import generator_state, set_generator_state
from foundation.machine.sharding import clip_gradients
from foundation.measure.metrics import primary
from foundation.models.forward import device_of, on_device
from foundation.models.layers.expert_parallel import stacked_where_listed
from foundation.models.layers.own_answers import answering
from foundation.models.meta import empty_caches
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor
from foundation.training.allowed import check_together
from foundation.training.few_parameters.lora import adapted
from foundation.training.finite import MOST_REPEATED, Gradients, blamed, not_finite
from foundation.training.grad_cache import GradCache
from foundation.training.history import History
from foundation.training.kept_zeros import ZeroMasks
from foundation.training.optimizers import moments_of, optimizer_of
from foundation.training.precision import autocast_dtype, dtype_for
from foundation.training.processes.dealing import Dealing
from foundation.training.processes.division import Division, counted, divided, in_model, sharers_of
from foundation.training.processes.engine import Engine
from foundation.training.processes.gathered import NO_ROW
from foundation.training.processes.pace import paced
from foundation.training.processes.pipeline import Pipeline, pipelined
from foundation.training.processes.row_draws import row_draws
from foundation.training.recompute import caches_casts, recomputed
from foundation.training.rows import Rows
from foundation.training.schedule import learning_rate, steps_in
from foundation.training.settings import TrainingSettings
from foundation.training.state import Entry, Gathers, State, Unwritten, read_state, rows_digest, seeded, weights_digest, write_state

RANK_SEED = 1_000_003
"""Distance between the seeds of two processes, so that their dropout differs."""


class TrainConfig(TrainingSettings):
    """Settings of the training loop: a training's own, and what a stage decides by itself."""

    LATER: ClassVar[tuple[str, ...]] = ()  # checkpoints of trainings name all settings

    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Maximum gradient norm; larger gradients are scaled down."""
    look_first: bool = False
    """Whether the initial weights count as a candidate for the best: for models that are already good."""
    checkpoint_seconds: Annotated[float, Field(ge=0)] = 60.0
    """Most seconds of training that a kill costs: a checkpoint is written before another step would exceed them. 0: after every step."""

    @classmethod
    def of(cls, settings: TrainingSettings, **changes: Any) -> TrainConfig:
        """Returns the settings of a training that a stage was given; `changes` take precedence."""
        return cls(**{**settings.model_dump(include=set(TrainingSettings.model_fields)), **changes})


@dataclass(frozen=True)
class Batch:
    """A batch of training rows."""

    features: dict[str, Tensor]
    """Inputs of the model: int64 `[b, L]` each, or `pixel_values` float32 `[b, channels, H, W]`."""
    labels: Tensor
    """Class ids int64 `[b]`, values float32 `[b]`, ids of the next tokens int32 `[b, T]`, or pairs float32 `[b, 2]`."""
    indices: NDArray[np.int64]
    """Index of each row in the training rows `[b]`; the key of cached teacher outputs."""
    step: int
    """Index of the step, from 0."""
    num_steps: int
    """Total number of steps."""
    counts: bool = True
    """False for filler rows that run only for the collectives, in a process without rows of the batch."""


Objective = Callable[[nn.Module, Batch], Mapping[str, Tensor]]
"""Runs the model on a batch and returns the weighted loss terms by name, float `[b]` each: one value per row.

An objective that is an `nn.Module` is trained and saved with the model (projections, learned scales)."""


@dataclass(frozen=True)
class Training:
    """The data, the settings and the checkpoint folder of one training."""

    split: Split
    """Training rows with class ids or values `[n]`, or ids of the next tokens `[n, T]`."""
    preprocessor: Preprocessor
    """Turns rows into features."""
    config: TrainConfig
    """Settings of the loop."""
    seed: int
    """Seed of row order and dropout."""
    scratch: Path
    """Folder for checkpoints within the stage; a checkpoint with the same settings is resumed."""
    progress: Progress
    select: Callable[[nn.Module], float] | None = None
    """Returns the value on the selection split; None keeps the last weights."""
    higher_is_better: bool = True
    """Whether a higher selection value is better."""
    selected_by: str = "selection"
    """Name of that value in messages."""
    label: str = "train"
    """Name in the progress bar and in messages."""
    depends: Any = None
    """Further dependencies of the objective (JSON types); a checkpoint in `scratch` is resumed only if they match."""
    parallel: Parallel = field(default_factory=Parallel)
    """How the training uses devices and their memory."""
    profiles: Path | None = None
    """Folder for a profile of its first steps; None: none is made."""
    team: Team = ALONE
    """The training processes; all of them call `train` with the same arguments. Only the first one evaluates on the selection split (all of
    them if the model is sharded) and writes to `scratch`."""

    @classmethod
    def of(cls, context: Context, preprocessor: Preprocessor, config: TrainConfig, label: str, **changes: Any) -> Training:
        """Returns a training on the train split of a run; `changes` take precedence over the context."""
        usual: dict[str, Any] = {
            "split": context.data.train,
            "seed": context.seed,
            "scratch": context.scratch,
            "progress": context.progress,
            "team": context.team,
            "parallel": context.parallel,
            "profiles": context.profiles,
            "higher_is_better": primary(context.task).higher_is_better,
        }
        return cls(preprocessor=preprocessor, config=config, label=label, **{**usual, **changes})


def train(model: nn.Module, objective: Objective, training: Training) -> History:
    """Trains `model` in place and leaves it in evaluation mode with the best or last weights (`config.keep`).

    Args:
        model: A loaded checkpoint on the training device.
        objective: Returns the loss terms of a batch.
        training: Data, settings and checkpoint folder.

    Returns:
        The history of the whole training, including resumed parts.

    Raises:
        InputError: There are no rows, or the loss or its gradient became NaN or infinite.
    """
    empty_caches()
    if not len(training.split):
        raise InputError(training.label, "no rows to train on", remedy="give a train split")
    if training.split.together > 1:
        check_together(training.config, training.split, training.label)
    spreads = training.team.experts > 1
    with adapted(model, training.config.lora, training.seed, training.label), stacked_where_listed(model, spreads):
        return _trained(model, objective, training)


def _trained(model: nn.Module, objective: Objective, training: Training) -> History:
    """Trains what is trainable in a model, as `train` does."""
    config, team, progress, scratch = training.config, training.team, training.progress, training.scratch
    trained = nn.ModuleList([model, objective] if isinstance(objective, nn.Module) else [model])
    team.align(trained)
    digest = weights_digest(model, objective if isinstance(objective, nn.Module) else None)
    loop = _Loop(model, objective, trained, training)
    settings = {
        "config": config.model_dump(mode="json", exclude={"checkpoint_seconds"}),
        "seed": training.seed,
        "rows": rows_digest(training.split.rows, training.split.labels.array),
        "weights": digest,
        "depends": training.depends,
        "autocast": str(loop.autocast),
        "torch": torch.__version__,
        **({"checkpointing": "int8"} if training.parallel.checkpointing == "int8" else {}),  # the others change no gradient
    }
    loop.history.higher_is_better = training.higher_is_better
    again = recomputed(model, training.parallel.checkpointing, training.label)
    with seeded(training.seed + RANK_SEED * team.stream), again:
        loop.resume(read_state(scratch, settings, progress.warn) if team.is_first else None, progress, training.seed)
        loop.run(lambda state: write_state(scratch, settings, state), progress, training.profiles)
    return loop.finish()


class _Loop:
    """The state of one training and its steps."""

    def __init__(self, model: nn.Module, objective: Objective, trained: nn.Module, training: Training) -> None:
        config, label, team = training.config, training.label, training.team
        self.model, self.trained, self.config, self.team = model, trained, config, team
        self.seed, self.select, self.selected_by, self.label = training.seed, training.select, training.selected_by, label
        self.texts, self.warn = training.split.rows, training.progress.warn
        self.caches_casts = caches_casts(training.parallel.checkpointing)
        self.rows = Rows.prepare(training.split.rows, training.preprocessor)
        self.labels = torch.from_numpy(training.split.labels.array)
        self.compares_runs = training.split.labels.COMPARED
        self.dealing = Dealing(training.split.runs, config.batch_size, config.micro_batch_size, team)
        share = -(-self.dealing.batch_size // team.data_size)
        at_once = min(share, self.dealing.micro_batch_size or share)
        divides = team.pipeline > 1
        self.pipeline = pipelined(model, objective, self.rows, at_once, team, training.parallel, label) if divides else None
        self.division: Division | Pipeline = self.pipeline or divided(model, team, training.parallel, label)
        self.sharers = sharers_of(team)
        self.device, self.objective = device_of(model), objective
        threads = torch.get_num_threads()
        plan = team.plan if self.pipeline is None else self.pipeline.plan
        self.plan_text = f"{team.size} processes ({plan})" if team.size > 1 else "one process"
        self.plan_text += f" of {threads} thread{'s' * (threads > 1)}"
        self.history = History()
        self.autocast = team.broadcast_object(autocast_dtype(self.device))  # each process measures its own processor
        if not team.without_pipeline.runs_together:  # a single process cannot run such a model
            few = on_device(self.rows.batch(np.arange(min(2, len(self.rows.lengths)))), self.device)
            self.autocast = dtype_for(model, few, self.autocast, label, training.progress)
        self.history.autocast = str(self.autocast).removeprefix("torch.")
        self.optimizer = optimizer_of(config.optimizer, self.trained, config.learning_rate, config.weight_decay)
        self.masks = ZeroMasks(model)
        self.epoch_steps = self.dealing.epoch_steps
        self.num_steps = max(1, steps_in(config.epochs, self.epoch_steps))
        self.cache = GradCache.of(objective, model, config.micro_batch_size, label)
        self.draws = row_draws(team, self.device, self.rows, self.cache is not None)
        self.stream = team.stream if self.draws is None else 0  # what draws alike has one seed
        self.engine = Engine(self.cache.answers if self.cache else objective, model, trained, team, training.parallel, self.num_steps)
        self.keeps_best = config.keep == "best" and self.select is not None
        self.best: dict[str, Tensor] = {}
        self.sums: dict[str, float] = {}  # loss terms of this epoch, summed over its rows
        self.seen = 0  # rows of this epoch

    def run(self, write: Callable[[Unwritten], None], progress: Progress, profiles: Path | None) -> None:
        """Runs all remaining steps; the first process writes checkpoints, and a profile where a folder for it is given."""
        left = self.num_steps - self.history.steps
        profiler = None if profiles is None or not self.team.is_first else self._profiler(profiles, left)
        self.trained.train()
        batches: list[NDArray[np.int64]] = []
        if self.config.look_first and self.select is not None and not self.history.selection:
            progress.log(f"  {self.label}: initial weights, {self.selected_by} {self._judge(self.select):.4f}")
            self.trained.train()
        saved = last = time.monotonic()
        pacing = paced(self.team, self.label, self.warn, progress.log)
        with progress.bar(self.label, self.num_steps) as advance, pacing as pace:
            advance(self.history.steps)
            while self.history.steps < self.num_steps:
                begun, (epoch, position) = time.monotonic(), divmod(self.history.steps, self.epoch_steps)
                if not batches or position == 0:
                    batches = self.dealing.batches(self.rows.lengths, self.seed, epoch)
                profiled = profiler.step(self.rows.lengths[batches[position]].tolist()) if profiler else nullcontext()
                with profiled, pace.step(len(self.team.share(batches[position]))):
                    self._step(batches[position])
                self._look(epoch, progress)
                advance(1)
                now = time.monotonic()
                self.history.seconds, last = self.history.seconds + now - last, now
                if self.team.broadcast(now - saved + now - begun >= self.config.checkpoint_seconds):
                    self._save(write)
                    saved = time.monotonic()

    def _save(self, write: Callable[[Unwritten], None]) -> None:
        """Lets the first process write a checkpoint; nothing of it stays in memory."""
        state = self.state()
        if self.team.is_first:
            write(state)
        else:
            state.gather()

    def _profiler(self, folder: Path, left: int) -> Any:
        """Returns the profiler of the remaining steps."""
        from foundation.training.profile import Profiler, macs_of

        return Profiler(folder, self.label, self.device, self.autocast, self.team.size, macs_of(self.model), left)

    def _step(self, indices: NDArray[np.int64]) -> None:
        """Takes one optimizer step on the rows `indices`."""
        step, config = self.history.steps, self.config
        dtype = torch.float32 if self.history.repeated >= MOST_REPEATED else self.autocast
        found = self._gradients(indices, dtype)
        if dtype != torch.float32 and (wrong := not_finite(found)) is not None:
            self.warn(f"{self.label}: the {wrong} in bfloat16 in step {step + 1}; the step is taken again in float32")
            self.history.repeated += 1
            found = self._gradients(indices, torch.float32)
        if (wrong := not_finite(found)) is not None:
            self.trained.eval()  # one row alone has no statistics of a batch
            alone = self.team.size == 1
            self._stop(wrong, blamed(indices, self.texts, lambda part: self._gradients(part, torch.float32)) if alone else "")
        for name, value in found[0].items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.num_steps, config.learning_rate, config.warmup, config.schedule)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return_memory_if_short()  # batches of many lengths
        self.history.steps += 1
        self.seen += len(indices)

    def _gradients(self, indices: NDArray[np.int64], dtype: torch.dtype) -> Gradients:
        """Computes the clipped gradient of the rows `indices`; returns the sums of the loss terms and the norm before clipping."""
        # A process without rows runs one that does not count: all processes must take part in gathering a sharded model.
        parts = [(part if len(part) else self.dealing.first(indices), len(part) > 0) for part in self.dealing.parts(indices)]
        num_rows = len(indices) * self.team.context  # each of the processes that share tokens takes its part of the loss
        sums: dict[str, float] = {}
        self.optimizer.zero_grad(set_to_none=True)
        if self.cache is not None:
            batches = [self._batch(*part) for part in parts]
            sums = self.cache.backward(self.engine, batches, num_rows, partial(self._autocast, dtype))
        for number, (part, every) in enumerate(zip(parts, self.dealing.at_once(indices), strict=True) if self.cache is None else [], 1):
            drawing = nullcontext() if self.draws is None else self.draws.of(part[0], every)
            with self.engine.micro_batch(last=number == len(parts)), drawing:
                terms = self._backward(*part, num_rows, dtype)
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + value
        sums = dict(zip(sums, self.team.total(list(sums.values())), strict=True))
        self.division.sum_gradients()
        self.masks.apply()
        return sums, self._clip()

    def _clip(self) -> float:
        """Clips the gradient norm of the whole batch; returns the norm before."""
        if self.pipeline is not None:
            return self.pipeline.clip(self.config.max_grad_norm)
        if self.team.shards:
            return clip_gradients(self.trained.parameters(), self.config.max_grad_norm)
        return float(nn.utils.clip_grad_norm_(self.trained.parameters(), self.config.max_grad_norm))

    def _backward(self, indices: NDArray[np.int64], counts: bool, num_rows: int, dtype: torch.dtype) -> dict[str, float]:
        """Accumulates the gradient of some rows of a `num_rows` step; returns the sums of the loss terms, 0 if they do not count."""
        if self.pipeline is not None:
            batch = self._batch(self.pipeline.filled(indices), counts)
            return self.pipeline.backward(self.objective, batch, len(indices) * counts, num_rows, self._autocast(dtype))
        batch = self._batch(indices, counts)
        if self.division.spread is not None:
            self.division.spread.idle = not counts
        with self._autocast(dtype), answering(self.sharers):
            parts = self.engine(batch)
        sums = torch.stack([part.float().sum() for part in parts.values()])
        assert all(part.shape == (len(indices),) for part in parts.values()), {name: part.shape for name, part in parts.items()}
        sums = sums if counts else 0.0 * sums
        (sums.sum() / num_rows).backward()  # type: ignore[no-untyped-call]
        return dict(zip(parts, sums.tolist(), strict=True))

    def _batch(self, indices: NDArray[np.int64], counts: bool) -> Batch:
        """Returns rows as a batch on the device."""
        features = on_device(self.rows.batch(indices) if self.draws is None else self.draws.read(self.rows, indices), self.device)
        labels = self.labels[torch.from_numpy(indices)].to(self.device)
        if not counts and self.compares_runs:  # other processes must not compare theirs with these
            labels = torch.full_like(labels, NO_ROW)
        return Batch(features, labels, indices, self.history.steps, self.num_steps, counts)

    def _autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Returns the context of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, dtype == torch.bfloat16, self.caches_casts)

    def _stop(self, wrong: str, rows: str = "") -> NoReturn:
        """Ends a training with a NaN or infinite term."""
        raise InputError(
            self.label,
            f"the {wrong} in step {self.history.steps + 1} of {self.num_steps}{rows or ';'} lower learning_rate "
            f"({self.config.learning_rate:g} given), or lengthen warmup ({self.config.warmup:g} given)",
        )

    def _look(self, epoch: int, progress: Progress) -> None:
        """Evaluates on the selection split when due, and records the losses at the end of an epoch."""
        steps, every = self.history.steps, self.config.evaluate_every or self.epoch_steps
        finished = steps == self.num_steps
        message, figures = "", dict[str, float](epoch=epoch + 1, step=steps, steps=self.num_steps)
        if self.select is not None and (steps % every == 0 or finished):
            figures["selection"] = self._judge(self.select)
            message = f", {self.selected_by} {figures['selection']:.4f}"
        if steps % self.epoch_steps == 0 or finished:
            means = {name: total / self.seen for name, total in self.sums.items()}
            self.history.losses.append({"epoch": epoch + 1, **means, "loss": sum(means.values())})
            figures |= {**means, "loss": sum(means.values())}
            message = f", loss {figures['loss']:.4f}{message}{self._count_choices()}"
            self.sums, self.seen = {}, 0
        if message:
            progress.tick(self.label, f"  {self.label}: epoch {epoch + 1}, step {steps}/{self.num_steps}{message}", figures)

    def _count_choices(self) -> str:
        """Adds up what processes that spread experts have counted since the last time; returns it as text."""
        spread, history = self.division.spread, self.history
        if spread is None:
            return ""
        chosen, dropped = counted(spread, self.team)
        spread.chosen = spread.dropped = 0
        history.chosen, history.dropped = history.chosen + chosen, history.dropped + dropped
        return f", {dropped / chosen:.2%} of the choices of experts dropped" if spread.capacity is not None else ""

    def _judge(self, select: Callable[[nn.Module], float]) -> float:
        """Returns the selection value; keeps a copy of the weights if it is the best so far."""
        looks = self.team.is_first or self.team.runs_together
        value = self.team.broadcast(select(self.model) if looks else 0.0)
        if not math.isfinite(value):
            self._stop(f"value on the selection split became {value}")
        if self.history.improves(value):
            self.history.best_step = self.history.steps
            self.best = self._weights() if self.keeps_best else {}
        self.history.selection.append({"step": self.history.steps, "value": value})
        return value

    def _weights(self) -> dict[str, Tensor]:
        """Returns a copy of all weights that training changes, on the CPU unless they are sharded."""
        if self.team.without_pipeline.shards:
            return {name: value.detach().clone() for name, value in self._changing().items()}
        return {name: value.detach().cpu().clone() for name, value in self._changing().items()}

    def _changing(self) -> dict[str, Tensor]:
        """Returns the state dict without frozen parameters, which no checkpoint needs."""
        frozen = {name for name, parameter in self.trained.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
        return {name: value for name, value in self.trained.state_dict().items() if name not in frozen}

    def state(self) -> Unwritten:
        """Returns everything that `resume` needs; all processes must make this call."""
        entries = {f"now.{name}": Entry.of(value) for name, value in self._changing().items()}
        entries |= {f"best.{name}": Entry.of(value) for name, value in self.best.items()}
        for name, parameter in self.trained.named_parameters():
            entries |= {f"optimizer.{moment}.{name}": entry for moment, entry in moments_of(self.optimizer, parameter).items()}
        # processes that share layers or tokens have the same generator
        generators = self.team.gather(generator_state(self.device))[:: self.team.replicas]
        drawn: Gathers = {f"rank.{rank}": partial(torch.clone, generator) for rank, generator in enumerate(generators)}
        values = {
            "history": asdict(self.history),
            "sums": self.sums,
            "seen": self.seen,
            "processes": len(generators),
            "choices": counted(self.division.spread, self.team),
            "plan": self.plan_text,
        }
        return Unwritten({**self.division.collected(entries), **drawn}, values)

    def resume(self, state: State | None, progress: Progress, seed: int) -> None:
        """Resumes from the checkpoint of the first process, if there is one.

        What other processes, or another number of them, have saved is divided anew. The bits then equal an uninterrupted run's but for
        the order of additions, and processes that were not there draw new dropout.
        """
        torch.manual_seed(seed + RANK_SEED * self.stream)
        values = self.team.broadcast(None if state is None else state.values)
        if values is None:
            return
        now = self.trained.state_dict()
        parameters = {name: parameter for name, parameter in self.trained.named_parameters() if parameter.requires_grad}
        moments: dict[str, dict[str, Tensor]] = {}
        if self.stream >= values["processes"]:
            torch.manual_seed(seed + RANK_SEED * self.stream + values["history"]["steps"])
        for key, value in self.team.spread({} if state is None else state.tensors):
            kind, _, name = key.partition(".")
            if kind == "rank" and int(name) == self.stream:
                set_generator_state(self.device, value)
            elif not self.division.holds(key):
                continue
            elif kind == "now" and name in now:  # only a single process caches answers of its teacher
                now[name].copy_(self.division.part(in_model(key), now[name], value))
            elif kind == "best":
                self.best[name] = self.division.part(in_model(key), now[name], value).clone()  # `value` is part of the file
            elif kind == "optimizer":
                moment, _, name = name.partition(".")
                moments.setdefault(name, {})[moment] = self.division.part(in_model(key), parameters[name], value).clone()
        places = {parameter: i for i, parameter in enumerate(each for group in self.optimizer.param_groups for each in group["params"])}
        known = {places[parameters[name]]: values for name, values in moments.items()}
        self.optimizer.load_state_dict({"state": known, "param_groups": self.optimizer.state_dict()["param_groups"]})
        self.history, self.sums, self.seen = History(**values["history"]), values["sums"], values["seen"]
        if (spread := self.division.spread) is not None and values.get("choices") and self.team.is_first:
            spread.chosen, spread.dropped = values["choices"]
        other = "" if values["plan"] == self.plan_text else f", begun by {values['plan']}: the same up to rounding"
        progress.log(f"  {self.label}: resumed after step {self.history.steps} of {self.num_steps}{other}")

    def finish(self) -> History:
        """Loads the best weights if they are kept, and gathers a sharded model."""
        if self.best:
            self.trained.load_state_dict(self.best, strict=False)  # frozen parameters are not among the best: they did not change
        self.best = {}
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()  # a model that was divided is gathered now, and its shares are there too
        self.division.undo()
        self.model.eval()
        return self.history
