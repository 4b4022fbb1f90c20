"""The memory that each step takes at its peak, with all of its processes, predicted from shapes.

    training   libraries + weights, gradients, moments of the optimizer and the best weights (4 bytes each) + a teacher + activations
    quantize   libraries + the model, its float copy and its ranges, + activations of a batch without gradients; with qat as training
    evaluate   libraries + the model + activations of a batch without gradients
    export     libraries + the model, its graph and the graph's bytes + one engine process
    latency    libraries + all engine processes, which are alive together
    served     libraries + the server + one process for each model

    activations of a row      4 * tokens * layers * (7 hidden + 2.5 intermediate), what autograd keeps; without gradients the activations of
                              one layer
    tokens of a row           multiply-accumulates of a row outside attention / weights of the blocks

`compress.devices` counts activations exactly, by a training without memory that takes seconds; `plan --devices` shows those. Factors are
corrected by what earlier runs took (`compress.run.durations.predicted_memory`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.run.choose_buckets import Buckets
from compress.run.implicit import BATCH_SIZE, Evaluate, Latency
from export.export import Export
from foundation.core.engines import REFERENCE
from foundation.models.library import sizes_config
from foundation.models.size import Counts
from foundation.stage.context import Context
from foundation.stage.stage import Stage
from triton_repo.triton_repo import TritonRepo

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FLOAT = 4
LIBRARIES = 700_000_000
"""Resident bytes of a process that has loaded torch, Transformers and the stages."""
ENGINE = 250_000_000
"""Bytes of an engine process without its weights."""
SERVER = 400_000_000
"""Bytes of the server and a model process without its weights."""
MOMENTS = {"adamw": 2.0, "adamw8bit": 0.5, "adafactor": 0.1, "lamb": 2.0, "lars": 1.0}
"""Numbers of the optimizer for each weight."""


def memory_of(step: Stage, size: Counts, before: Counts, config: PreTrainedConfig, engines: int, context: Context) -> int:
    """Returns the bytes of the peak of a step.

    Args:
        step: The step.
        size: Parameters and multiply-accumulates of its model.
        before: Bytes of its input model, and of a teacher.
        config: Transformers config of its model.
        engines: Engines that are timed at one time.
        context: The context of the run.
    """
    weights, base = FLOAT * size.parameters, LIBRARIES
    settings = _training(step)
    if settings is not None:
        rows: int = min(settings.batch_size, getattr(settings, "micro_batch_size", None) or settings.batch_size)
        trained: float = weights * (2.0 + MOMENTS[settings.optimizer.name] + (getattr(settings, "keep", "best") == "best"))
        return round(base + trained + FLOAT * before.parameters * (step.NAME != "finetune") + rows * _row(size, config, stored=True))
    batch = BATCH_SIZE * _row(size, config, stored=False)
    if isinstance(step, Export):
        return round(base + 3 * weights + ENGINE + 3 * weights)
    if isinstance(step, Latency):
        return round(base + engines * (ENGINE + 1.5 * weights))
    if isinstance(step, TritonRepo):
        return round(base + (SERVER + 2 * weights) * step.serve * (context.target.device == "cpu"))
    if isinstance(step, Buckets):
        return round(base + ENGINE + 4 * weights)
    if step.NAME in ("prune", "sparsify", "compact", "quantize"):
        return round(base + 3 * weights + 2 * batch)
    return round(base + (weights + batch if isinstance(step, Evaluate) else 2 * weights))


def _training(step: Any) -> Any:
    """Returns the settings that a step trains with; None if it does not."""
    if step.NAME in ("finetune", "distill", "adapters"):
        return step
    if step.NAME == "quantize":
        return step.qat if step.mode != "ptq" else None
    return getattr(step, "recover", None)


def _row(size: Counts, config: PreTrainedConfig, *, stored: bool) -> float:
    """Returns the bytes of the activations of a row."""
    known = sizes_config(config)
    layers, hidden = max(1, getattr(known, "num_hidden_layers", 12)), getattr(known, "hidden_size", 768)
    wide = getattr(known, "intermediate_size", None) or 4 * hidden
    blocks = layers * (4 * hidden**2 + 2 * hidden * wide)
    tokens = max(1.0, (size.macs - size.attention_macs) / blocks)  # attention in one kernel stores nothing between pairs of tokens
    one = FLOAT * tokens * (7 * hidden + 2.5 * wide)
    logits = FLOAT * tokens * getattr(known, "vocab_size", 0) * 3 if "CausalLM" in str(getattr(config, "architectures", None)) else 0.0
    return one * (layers if stored else 1) + logits


def engine_count(builds: int, context: Context) -> int:
    """Returns about how many engine processes the latency step keeps alive."""
    return 2 + builds * sum(engine != REFERENCE for engine in context.target.engines)
