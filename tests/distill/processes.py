"""Trainings that one process and several come to the same in; run by `test_processes.py`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill.distill import Distill
from foundation.artifacts.artifact import Artifact
from foundation.core.target import Parallel, Target
from foundation.data.splits import Data, Split
from foundation.labels import candidates
from foundation.labels.next_token import labels_of
from foundation.labels.tasks import Task
from foundation.machine.parallel import ALONE, Team, joined
from foundation.stage.context import Context
from foundation.stage.stage import Stage
from foundation.training import adamw8bit, teacher_logits, train
from foundation.training.finetune import Finetune
from prune.prune import Prune
from prune.sparsify.sparsify import Sparsify
from quantize.quantize import Quantize
from tests import tiny_language_models
from tests.distill import rows_together
from tests.distill.conftest import LABELS, sentences
from tests.distill.plans import LEARNED, PLANS, PRUNED, USUAL
from tests.export import sentiment
from tests.told import Told

RECIPE = """
name: tiny
model:
  config: {model_type: vit, image_size: 8, patch_size: 4, num_channels: 1, hidden_size: 32, num_hidden_layers: 3, num_attention_heads: 2,
    intermediate_size: 64}
  init: random
  task: image-classification
  head: new
data: {path: "sklearn:digits"}
parallel: {strategy: STRATEGY}
stages:"""
"""Of runs of two processes, without their stages."""
ROWS, BATCH = 46, 5
"""Ten steps an epoch; the last of them has a single row, fewer than processes."""
STEADY = {"learning_rate": 2e-3, "batch_size": BATCH, "epochs": 5}
WRITES: Mapping[str, Mapping[str, Any]] = {
    "words": {"kind": "gpt2", "n_layer": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "grouped": {"kind": "llama", "num_hidden_layers": 4, "tie_word_embeddings": True},
    "mixture": {"kind": "mixtral"},
}
"""Checkpoints that write text, by the keys of their configs; both have the table of words as their head."""
LENGTHS = {"odd": 7}
"""Tokens of the longest rows where they are not 16: a number that two processes do not divide."""
LEARN = {"epochs": 1, "warmup": 1.0, "batch_size": BATCH, "learning_rate": 3e-4, "mask_learning_rate": 0.3, "micro_batch_size": 2}
GENTLE = {**STEADY, "learning_rate": 3e-4}
"""After masks or zeros were learned: what rounding has changed meanwhile must not grow."""
LEARNING = {"divisible_by": 2, "multiple_of": 2, "least_squares": False, "learn": LEARN, "recover": GENTLE}
"""In ten steps the gates of many units have hardly moved, so that rounding decides which of them goes first; few are pruned, which have."""
CASES: Mapping[str, tuple[str, Stage]] = {
    "finetune": ("still", Finetune(**STEADY, weight_decay=0.1)),
    "dropout": ("dropping", Finetune(**{**STEADY, "learning_rate": 3e-4}, weight_decay=0.1)),
    "answers": ("still", Distill(**{**STEADY, "epochs": 1}, student={"layers": 2}, loss="soft_target")),  # type: ignore[arg-type]
    "inside": (
        "still",
        Distill(
            **STEADY,  # type: ignore[arg-type]
            micro_batch_size=2,
            student={"layers": 2, "hidden": 8, "heads": 2},  # type: ignore[arg-type]
            losses=[{"name": "hidden"}, {"name": "minilmv2"}, {"name": "soft_target", "steps": [0.5, 1.0]}],  # type: ignore[arg-type]
        ),
    ),
    "int8": ("still", Quantize(mode="qat", qat={**STEADY, "learning_rate": 1e-5, "soft_weight": 0.5, "keep": "last"})),  # type: ignore[arg-type]
    "pruned": ("still", Prune(sparsity=0.4, recover=STEADY)),  # type: ignore[arg-type]
    "pruned in steps": (
        "still",
        Prune(sparsity=0.4, schedule="cubic", iterations=2, least_squares=False, recover={**STEADY, "hidden_weight": 0.5}),  # type: ignore[arg-type]
    ),
    "pruned twice": ("still", Prune(sparsity=0.4, schedule="cubic", iterations=2, least_squares=False, recover=STEADY)),  # type: ignore[arg-type]
    "pruned inside": (
        "still",
        Prune(sparsity=0.4, recover={**STEADY, "losses": [{"name": "hidden"}, {"name": "soft_target"}]}),  # type: ignore[arg-type]
    ),
    "divisible": ("still", Prune(sparsity=0.4, divisible_by=2, multiple_of=2, recover=STEADY)),  # type: ignore[arg-type]
    "states": (
        "still",
        Distill(**{**STEADY, "epochs": 1}, student={"layers": 2}, losses=[{"name": "hidden"}, {"name": "soft_target"}]),  # type: ignore[arg-type]
    ),
    "int8 low rank": (
        "still",
        Quantize(mode="qat", qat={**STEADY, "learning_rate": 1e-5, "soft_weight": 0.5, "keep": "last", "lora": {"rank": 4}}),  # type: ignore[arg-type]
    ),
    "int8 fused": ("fused", Quantize(mode="qat", qat={**STEADY, "learning_rate": 1e-5, "keep": "last"})),  # type: ignore[arg-type]
    "adapters": ("still", Finetune(**STEADY, lora={"rank": 4})),  # type: ignore[arg-type]
    "adapters fused": ("fused", Finetune(**STEADY, lora={"rank": 4})),  # type: ignore[arg-type]
    "pruned with adapters": (
        "still",
        Prune(sparsity=0.4, divisible_by=2, multiple_of=2, recover={**STEADY, "lora": {"rank": 4, "layers": ["*.query", "*.dense"]}}),  # type: ignore[arg-type]
    ),
    "fused": ("fused", Finetune(**STEADY)),  # type: ignore[arg-type]
    "words": ("words", Finetune(**STEADY)),  # type: ignore[arg-type]
    "grouped": ("grouped", Finetune(**STEADY)),  # type: ignore[arg-type]
    "mixture": ("mixture", Finetune(**STEADY, weight_decay=0.1)),  # type: ignore[arg-type]
    "mixture in parts": ("mixture", Finetune(**STEADY, micro_batch_size=1)),  # type: ignore[arg-type]
    "taught mixture": ("mixture", Distill(**STEADY, student={"layers": 2}, loss="soft_target")),  # type: ignore[arg-type]
    "pruned mixture": ("mixture", Prune(sparsity=0.3, granularity=["experts"], measure="parameters", divisible_by=2, recover=STEADY)),  # type: ignore[arg-type]
    "uneven": ("odd", Finetune(**{**STEADY, "learning_rate": 5e-4})),  # type: ignore[arg-type]
    "taught words": ("words", Distill(**STEADY, student={"layers": 2}, loss="soft_target")),  # type: ignore[arg-type]
    "parts": ("still", Finetune(**STEADY, micro_batch_size=4)),  # type: ignore[arg-type]
    "order": ("ordered", Finetune(**{**STEADY, "batch_size": 8}, micro_batch_size=2)),  # type: ignore[arg-type]
    "adafactor": ("still", Finetune(**STEADY, optimizer={"name": "adafactor"})),  # type: ignore[arg-type]
    "lamb": ("still", Finetune(**{**STEADY, "learning_rate": 1e-3}, optimizer={"name": "lamb"})),  # type: ignore[arg-type]
    "lars": ("still", Finetune(**{**STEADY, "learning_rate": 1e-3}, optimizer={"name": "lars"})),  # type: ignore[arg-type]
    "eight bits": ("still", Finetune(**STEADY, optimizer={"name": "adamw8bit"})),  # type: ignore[arg-type]
    "zeros": ("still", Sparsify(method="magnitude", sparsity=0.5, recover=STEADY)),  # type: ignore[arg-type]
    **{
        name: (kind, Finetune(**{**STEADY, "batch_size": rows_together.BATCH[kind], **given}))
        for name, kind, given in (
            ("negatives", "mined", {}),
            ("given negatives", "mined", {"loss": "triplet", "micro_batch_size": 4}),
            ("pairs", "pairs", {}),
            ("hardest", "pairs", {"loss": "triplet"}),
            ("scored", "scored", {}),
            ("ranked", "scored", {"loss": "ranking"}),
            ("towers", "towers", {}),
            ("joined negatives", "mined", {"micro_batch_size": 4}),
            ("joined pairs", "pairs", {"micro_batch_size": 2}),
        )
    },
    "taught pairs": (
        "pairs",
        Distill(**{**STEADY, "batch_size": 6}, student={"layers": 1}, loss="soft_target", hard_weight=0.5),  # type: ignore[arg-type]
    ),
    "similar": ("scored", Distill(**{**STEADY, "batch_size": 6}, student={"layers": 1}, loss="similarity")),  # type: ignore[arg-type]
    "joined similar": (
        "scored",
        Distill(**{**STEADY, "batch_size": 6}, micro_batch_size=2, student={"layers": 1}, loss="similarity"),  # type: ignore[arg-type]
    ),
    "relations": (
        "still",
        Distill(**{**STEADY, "batch_size": 11, "epochs": 10}, student={"layers": 2}, losses=[{"name": "relational"}]),  # type: ignore[arg-type]
    ),  # five steps an epoch, the last one of two rows: fewer than three processes
    "related pairs": ("pairs", Distill(**{**STEADY, "batch_size": 6}, student={"layers": 1}, losses=[{"name": "relational"}])),  # type: ignore[arg-type]
    "margins": ("mined", Distill(**{**STEADY, "batch_size": 12}, student={"layers": 1}, loss="margin_mse")),  # type: ignore[arg-type]
    "int8 pairs": (
        "pairs",
        Quantize(mode="qat", qat={**STEADY, "batch_size": 6, "learning_rate": 1e-5, "soft_weight": 0.5, "keep": "last"}),  # type: ignore[arg-type]
    ),
    **{
        name: ("still", Prune(method=method, sparsity=sparsity, granularity=of, **LEARNING))  # type: ignore[arg-type]
        for name, method, sparsity, of in (
            ("joint", "joint", 0.1, ["heads", "ffn"]),
            ("joint channels", "joint", 0.1, ["hidden", "layers", "heads", "ffn"]),
            ("moved units", "movement", 0.4, ["heads", "ffn"]),
        )
    },
    **{  # movement in blocks: of single weights so many have nearly equal scores that rounding chooses between them
        method: (
            "still",
            Sparsify(method=method, pattern={"block": [4, 4]}, sparsity=0.5, rows=16, learning={**STEADY, "epochs": 1}, recover=GENTLE),  # type: ignore[arg-type]
        )
        for method in ("movement", "lasso")
    },
}
SHORT = 1.2  # epochs of the part `quick`: twelve steps, the last two of a second epoch
CUT = (
    "int8",
    "int8 low rank",
    "int8 fused",
    "int8 pairs",
    "pruned with adapters",
    "pruned twice",
    *PRUNED,
    "divisible",
    "zeros",
    "pruned mixture",
    *LEARNED,
)
"""Those that start from rounded, cut or zeroed weights."""
KILLED: Mapping[str, Stage] = {
    "distilled": Distill(student={"layers": 2}, loss="soft_target", epochs=1, learning_rate=2e-3, batch_size=BATCH),  # type: ignore[arg-type]
    "int8": Quantize(mode="qat", qat={**STEADY, "epochs": 1, "dropout": True, "keep": "last"}),  # type: ignore[arg-type]
    "adapters": Finetune(**{**STEADY, "epochs": 1}, lora={"rank": 4, "dropout": 0.3}),  # type: ignore[arg-type]
    "eight bits": Finetune(**{**STEADY, "epochs": 1}, optimizer={"name": "adamw8bit"}),  # type: ignore[arg-type]
    "masks": Prune(method="joint", sparsity=0.1, **{**LEARNING, "recover": {**GENTLE, "epochs": 1}}),  # type: ignore[arg-type]
    "negatives": Finetune(**{**STEADY, "epochs": 1, "batch_size": 12}),  # type: ignore[arg-type]
}
"""Stages on a model with dropout, of ten steps each; masks have ten more before."""
KILLED_ON: Mapping[str, str] = {"negatives": "mined dropping"}
"""What they are trained on where it is not `dropping`."""
KILLED_IN = [("quick", "ddp", "distilled"), ("slow", "ddp", "int8"), ("slow", "fsdp2", "distilled"), ("slow", "fsdp2", "int8")]
KILLED_IN += [("groups", plan, "negatives") for plan in ("ddp", "fsdp2")]
KILLED_IN += [("slow", "tensor", name) for name in KILLED if name not in KILLED_ON] + [
    ("slow", "fsdp2", "eight bits"),
    ("slow", "ddp", "masks"),
]
# a student has two blocks, too few for interleaved stages
KILLED_IN += [("slow", "pipeline", "distilled"), ("slow", "pipeline, interleaved", "eight bits"), ("four", "pipeline and ddp", "distilled")]
KILLED_IN += [("four", plan, name) for plan in ("tensor and ddp", "tensor and fsdp2") for name in KILLED if name not in KILLED_ON]
KILLED_IN += [("tokens", plan, "distilled") for plan in ("tensor with sequence", "tensor with sequence, little memory")]
KILLED_IN += [("context", "context", "distilled"), ("context", "context, sharded", "int8")]
KILLED_IN += [("tokens in four", "tensor with sequence and fsdp2", "distilled")]
"""Where they are killed."""
MOVED_IN = [("quick", plan) for plan in ("fsdp2", "pipeline")]  # weights in shards, and blocks in two places
MOVED_IN += [("slow", plan) for plan in ("ddp", "tensor")] + [("tokens", "tensor with sequence")]
MOVED_IN += [("context", plan) for plan in ("context", "context, sharded")]
MOVED_IN += [("four", plan) for plan in ("tensor and ddp", "tensor and fsdp2", "pipeline and ddp")]
"""Plans that go on with what one process began, and begin what one process goes on with."""


MOVED = Finetune(**{**STEADY, "epochs": 1}, weight_decay=0.1)
"""A training of ten steps without dropout that is killed by some processes and continued by others."""


class Killed(Exception):
    """Stands for a kill."""


def context_of(folder: Path, kind: str, scratch: Path, team: Team, parallel: Parallel) -> Context:
    """The context of a stage on one of the checkpoints in `folder`."""
    words, ordered, vectors = kind in WRITES, kind == "ordered", kind in rows_together.KINDS
    made = of_lengths if words else pairs_in_order if ordered else sentences
    splits = [made(num_rows, seed) for seed, num_rows in enumerate((ROWS, 20, 20))]
    data = Data(splits[0], splits[1], splits[2], () if words else LABELS[1 if ordered else 2])
    data = rows_together.data_of(kind) if vectors else data
    baseline = Artifact(folder / kind, {"id": "baseline", "stage": "model", "digest": "0" * 64})
    mine = scratch if team.is_first else scratch.with_name(f"{scratch.name}.{team.rank}")
    target = Target(sequence_lengths=(8,))
    told, known = Told(), {"baseline": baseline}
    task: Task = "text-generation" if words else "reranking" if ordered else "text-classification"
    length = tiny_language_models.LENGTH if words else LENGTHS.get(kind, 16)
    task, length = (rows_together.task_of(kind), sentiment.LENGTH) if vectors else (task, length)
    return Context(task, data, length, target, 0, told, mine, known, teachers=(baseline,), team=team, parallel=parallel)


def of_lengths(num_rows: int, seed: int) -> Split:
    """Blocks of random ids, each of 3 to 12 tokens, so that micro-batches predict different numbers of them."""
    random, most = np.random.default_rng(seed), tiny_language_models.LENGTH
    rows = [random.integers(0, tiny_language_models.VOCABULARY, random.integers(3, most + 1)).astype(np.int32) for _ in range(num_rows)]
    return Split(list(rows), labels_of(rows, most - 1))


def pairs_in_order(num_rows: int, seed: int) -> Split:
    """Queries with two candidates each, the second of which is relevant."""
    lists = num_rows // 2
    labels = candidates.labels_of([number for number in range(lists) for _ in range(2)], [0, 1] * lists, [[1]] * lists)
    return Split(sentences(num_rows, seed).rows, labels)


def run(folder: Path, kind: str, stage: Stage, out: Path, scratch: Path, team: Team, parallel: Parallel = USUAL) -> dict[str, Any]:
    """Runs one stage in float32.

    Returns:
        Its figures, the norm of the gradient of every step as `norms`, how many `rows` it took, and the digest of its model as `weights`.
    """
    context = context_of(folder, kind, scratch, team, parallel)
    out.mkdir(parents=True, exist_ok=True)
    train.autocast_dtype = teacher_logits.autocast_dtype = lambda device: torch.float32
    norms, clip, parts, finish, rows, digests = [], train._Loop._clip, train.Dealing.parts, train._Loop.finish, [0], [""]
    fewest, adamw8bit.FEWEST = adamw8bit.FEWEST, 64  # weights here are small

    def noted(self: Any) -> float:
        norms.append(clip(self))
        return norms[-1]

    def counted(self: Any, indices: Any) -> Any:
        dealt = parts(self, indices)
        rows[0] += sum(map(len, dealt))
        return dealt

    def ended(self: Any) -> Any:
        history = finish(self)
        digests.append(train.weights_digest(self.model, None))
        return history

    train._Loop._clip, train.Dealing.parts, train._Loop.finish = noted, counted, ended  # type: ignore[method-assign]
    try:
        return {**trained(stage.run(context.baseline, context, out)), "norms": norms, "rows": rows[0], "weights": digests[-1]}
    finally:
        train._Loop._clip, train.Dealing.parts, train._Loop.finish = clip, parts, finish  # type: ignore[method-assign]
        adamw8bit.FEWEST = fewest


def trained(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of a training, wherever a stage puts them: those of several iterations one after another."""
    if isinstance(figures.get("steps"), list):
        parts = figures["steps"]
        return {
            "losses": [entry for part in parts for entry in part["losses"]],
            "selection": [entry for part in parts for entry in part["selection"]],
            "steps": sum(part["steps"] for part in parts),
        }
    found = figures.get("qat") or figures.get("recovery") or figures
    if not found:  # the first process alone has figures
        return {}
    values = found["selection"]
    return {**found, "selection": values["values"] if isinstance(values, dict) else values}


@contextlib.contextmanager
def dying(step: int) -> Iterator[None]:
    """Every process is killed after a step; every step before has its checkpoint."""
    original, seconds = train._Loop._look, train.TrainConfig.model_fields["checkpoint_seconds"].default

    def look(self: Any, *arguments: Any) -> None:
        if self.history.steps == step + 1:
            raise Killed
        original(self, *arguments)

    train._Loop._look = look  # type: ignore[method-assign]
    train.TrainConfig.model_fields["checkpoint_seconds"].default = 0.0
    train.TrainConfig.model_rebuild(force=True)
    try:
        yield
    finally:
        train._Loop._look = original  # type: ignore[method-assign]
        train.TrainConfig.model_fields["checkpoint_seconds"].default = seconds
        train.TrainConfig.model_rebuild(force=True)


def together(folder: Path, part: str) -> None:
    """What several processes do; writes one folder for each case, and `results.json`."""
    results: dict[str, Any] = {}
    with joined() as first:
        for plan, (parallel, cases) in PLANS[part].items():
            team = parallel.of(first)

            def ran(kind: str, stage: Stage, name: str, scratch: Path, plan: str = plan, team: Team = team) -> dict[str, Any]:
                out = folder / plan / (name if team.is_first else f"{name}.{team.rank}")
                found = run(folder, kind, stage, out, scratch, team, PLANS[part][plan][0])
                drawn = team.gather(torch.tensor(list(bytes.fromhex(found["weights"])), dtype=torch.uint8))
                return {**found, "alike": all(torch.equal(drawn[0], other) for other in drawn)}

            for name in cases:
                results[f"{plan} {name}"] = ran(*case_of(part, name), name, folder / plan / f"{name}-scratch")
            for name in (name for at, of, name in KILLED_IN if (at, of) == (part, plan)):
                stage, scratch = KILLED[name], folder / plan / f"killed-{name}-scratch"
                kind = KILLED_ON.get(name, "dropping")
                ran(kind, stage, f"whole-{name}", folder / plan / f"whole-{name}-scratch")
                with dying(4), contextlib.suppress(Killed):
                    ran(kind, stage, f"killed-{name}", scratch)
                torch.manual_seed(99 + first.rank)  # new processes have other generators
                results[f"{plan} resumed {name}"] = ran(kind, stage, f"resumed-{name}", scratch)
            if (part, plan) in MOVED_IN:
                with dying(4), contextlib.suppress(Killed):
                    ran("still", MOVED, "killed-moved", folder / f"from several {plan}")
                results[f"to {plan}"] = ran("still", MOVED, "moved", folder / f"from one {plan}")
        drawn = first.gather(torch.tensor([float(first.rank)]))
        results["ranks"] = [float(value) for value in drawn]
        if first.is_first:
            (folder / "results.json").write_text(json.dumps(results))


def case_of(part: str, name: str) -> tuple[str, Stage]:
    """The checkpoint and the stage of a case; those of the part `quick` take twelve steps."""
    kind, stage = CASES[name]
    qat = getattr(stage, "qat", None)
    short = {"epochs": SHORT} if qat is None else {"qat": qat.model_copy(update={"epochs": SHORT})}
    return kind, stage.model_copy(update=short) if part == "quick" else stage


def kinds_of(part: str) -> set[str]:
    """What the trainings of a part are trained on."""
    trained = {CASES[name][0] for _, names in PLANS[part].values() for name in names}
    return trained | {KILLED_ON.get(name, "dropping") for at, _, name in KILLED_IN if at == part}


def killed_alone(folder: Path, part: str) -> None:
    """Leaves, for every plan that goes on with it, the training that one process began."""
    for plan in moved_in(part):
        with dying(4), contextlib.suppress(Killed):
            run(folder, "still", MOVED, folder / "alone" / f"killed for {plan}", folder / f"from one {plan}", ALONE)


def moved_to_one(folder: Path, part: str) -> dict[str, Any]:
    """What one process makes of trainings that several began, and of one that it begins itself."""
    sources = {plan: folder / f"from several {plan}" for plan in moved_in(part)} | {"none": folder / "from none"}
    return {
        f"from {plan}": run(folder, "still", MOVED, folder / "alone" / f"from {plan}", source, ALONE) for plan, source in sources.items()
    }


def moved_in(part: str) -> list[str]:
    """The plans of a part that are in `MOVED_IN`."""
    return [plan for at, plan in MOVED_IN if at == part]


def alone(folder: Path, part: str) -> dict[str, Any]:
    """What one process does."""
    names = {name for _, cases in PLANS[part].values() for name in cases}
    return {
        name: run(folder, *case_of(part, name), folder / "alone" / name, folder / "alone" / f"{name}-scratch", ALONE)
        for name in CASES
        if name in names
    }
