"""Whether processes can spread the experts of a model (`foundation.models.layers.expert_parallel`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foundation.core.errors import InputError, Problem
from foundation.labels.tasks import Task
from foundation.models.architecture.sequence import check_left_out
from foundation.models.architecture.shapes import on_meta
from foundation.models.layers.experts import is_stacked
from foundation.models.layers.listed_experts import is_listed
from foundation.models.library import with_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_experts(config: PreTrainedConfig, task: Task, processes: int, key: str, adapters: bool = False, learns: bool = True) -> None:
    """Checks before the first stage that processes can spread the experts of a model.

    Args:
        config: Transformers config of the model.
        task: The task.
        processes: Number of processes that spread experts.
        key: Key path of the stage, for messages.
        adapters: Whether adapters are trained instead of the weights.
        learns: Whether it is trained; a teacher is not.

    Raises:
        InputError: It has no experts, they do not divide evenly, they are layers that adapters would change, or it leaves out blocks in
            training.
    """
    given = Problem(f"{key}: parallel.experts", f"{processes} given", f"this {config.model_type}")
    modules: list[Any] = [module for module in on_meta(with_class(config, task)).modules() if is_stacked(module) or is_listed(module)]
    counts = sorted({int(module.num_experts) for module in modules})
    if not counts:
        raise InputError.of([given.because("is no mixture of experts", "give experts: 1")])
    if uneven := [count for count in counts if count % processes]:
        fits = [str(number) for number in range(1, min(counts) + 1) if not any(count % number for count in counts)]
        raise InputError.of([given.because(f"has layers of {uneven[0]} experts", f"give {' or '.join(fits)}")])
    if adapters and any(is_listed(module) for module in modules):
        raise InputError.of([given.because("has experts that adapters change", "give experts: 1, or train without lora")])
    if learns:
        check_left_out(config, given, lambda name: f"give experts: 1, or {name}: 0 in config.json")
