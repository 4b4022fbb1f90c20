"""What two processes hold of a training, and what the plan says; run by `test_processes.py`."""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from compress.devices.trained import Training, in_stages, needed
from foundation.core.target import Parallel
from foundation.labels.tasks import TASKS
from foundation.machine.parallel import Team, joined
from foundation.models.architecture.shapes import auto_class
from foundation.models.layers.own_answers import answering
from foundation.models.library import with_class
from foundation.models.size import inputs_of
from foundation.training.choices import Optimizer
from foundation.training.losses.table import losses_of
from foundation.training.optimizers import optimizer_of
from foundation.training.processes.division import divided, sharers_of
from foundation.training.processes.engine import Engine
from foundation.training.processes.pipeline import pipelined
from foundation.training.train import Batch
from tests.training_memory import KINDS, Alive

ROWS, LENGTH = 16, 64
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("bert", {}),
    "context": ("llama", {"context": 2}),
    "pipeline": ("bert", {"pipeline": 2}),
    "interleaved": ("llama", {"pipeline": 2, "schedule": "interleaved"}),
}


def peak_of(kind: str, parallel: Parallel, team: Team) -> int:
    """Returns the most bytes that tensors of this process take in the second step of a training."""
    task, config = KINDS[kind]
    config = with_class(copy.deepcopy(config), task)
    config.use_cache, config.num_hidden_layers = False, 4
    torch.manual_seed(0)
    model = auto_class(task, config).from_config(config).train()
    team.align(model)
    rows = ROWS // team.data_size
    features = {name: value.repeat(rows, *[1] * (value.ndim - 1)) for name, value in inputs_of(config, task, LENGTH).items()}
    ids, classes = torch.zeros((rows, LENGTH - 1), dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    batch = Batch(features, ids if TASKS[task].generates else classes, np.arange(rows), 0, 1)

    def objective(answers: Any, part: Any) -> dict[str, torch.Tensor]:
        return {"loss": losses_of(task).labelled(answers(**part.features).logits.float(), part.labels)}

    with ExitStack() as stack:
        pipeline = None
        if team.pipeline > 1:
            few: Any = SimpleNamespace(
                lengths=np.full(rows, LENGTH), batch=lambda chosen: {name: features[name][chosen] for name in features}
            )
            pipeline = pipelined(model, objective, few, rows, team, parallel, "finetune")
            trained = torch.nn.ParameterList(pipeline.own.values())
        else:
            divided(model, team, parallel, "finetune")
            trained = torch.nn.ParameterList(model.parameters())
        optimizer = optimizer_of(Optimizer(), trained, 1e-4, 0.0)
        engine = Engine(objective, model, model, team, parallel)
        alive = stack.enter_context(Alive([*trained, *model.buffers()]))
        for _ in range(2):
            alive.peak = 0
            if pipeline is not None:
                pipeline.backward(objective, batch, rows, rows, torch.autocast("cpu", enabled=False))
                pipeline.sum_gradients()
            else:
                with engine.micro_batch(last=True), answering(sharers_of(team)):
                    (engine(batch)["loss"].sum() / ROWS).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return alive.peak


def main(out: Path) -> None:
    """Writes measured and predicted bytes of each process by case."""
    found = {}
    with joined() as first:
        for name, (kind, section) in CASES.items():
            task, config = KINDS[kind]
            config = copy.deepcopy(config)
            config.num_hidden_layers = 4
            training = Training(config, task, ROWS, None, LENGTH, keeps_best=False, half=False, **section)
            parallel = Parallel(**section)
            plans = in_stages(training, first.size) if "pipeline" in section else [needed(training, first.size)] * first.size
            found[name] = (peak_of(kind, parallel, parallel.of(first)), plans[first.rank].peak)
        (out / f"{first.rank}.json").write_text(json.dumps(found))
