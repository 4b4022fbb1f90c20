"""Escalation (`mode: auto`): tries quantization methods, cheapest first, until one meets the accuracy goal.

    ptq  ->  smoothing and bias correction  ->  mixed precision  ->  qat  ->  qat with distillation

Every step starts from the float model again and is measured by the same loss on selection rows (`quantize.budget`). The first that loses at
most `goals.max_drop` is taken; if none does, the one with the smallest loss. All attempts are reported with their loss and their time in
seconds. Rotations are learned in the first step and are the same in all: neither rows nor roundings differ.

Not supported: continuing from the previous step. A smoothed model is no better start for training than the float one, and mixed precision
would keep QAT from recovering the layers that it leaves in float.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from foundation.machine.device import computing_device
from foundation.models.checkpoint import load
from foundation.schemes.sites import placed
from foundation.stage.context import Context
from quantize.budget import Budget
from quantize.in_memory import Quantized, quantize_in_memory
from quantize.rotation.learned import Memory
from quantize.settings import MixedPrecision, QuantizeSettings
from quantize.trial import in_int8

DEFAULT_MAX_DROP = 0.01


def budget_of(context: Context) -> float:
    """Returns the largest allowed loss: the goal `max_drop`, or 1 percentage point without that goal."""
    return DEFAULT_MAX_DROP if context.goals.max_drop is None else context.goals.max_drop


def ladder(stage: QuantizeSettings, max_drop: float) -> dict[str, QuantizeSettings]:
    """Returns the settings of every step by name, cheapest first."""
    ptq = stage.model_copy(update={"mode": "ptq"})
    smoothed = ptq.model_copy(update={"smoothquant": stage.smoothing or True, "bias_correction": True})
    mixed = stage.mixed_precision or MixedPrecision(max_drop=max_drop)
    training = {"mode": "qat", "rounding": "nearest", "mixed_precision": None}
    trained = {
        name: stage.model_copy(update={**training, "qat": stage.qat.model_copy(update={"distill": distill})})
        for name, distill in (("qat", False), ("qat with distillation", True))
    }
    return {
        "ptq": ptq.model_copy(update={"mixed_precision": None}),
        "smoothing and bias correction": smoothed.model_copy(update={"mixed_precision": None}),
        "mixed precision": smoothed.model_copy(update={"mixed_precision": mixed}),
        **trained,
    }


def escalate(stage: QuantizeSettings, source: Path, context: Context) -> Quantized:
    """Runs the steps of the ladder until one meets the goal; returns it, or the one with the smallest loss."""
    limit = budget_of(context)
    rows = context.data.calibration(stage.calibration.rows, context.seed).rows
    budget = Budget.prepare(load(source, computing_device()), source, rows, context)
    tried: list[tuple[float, Quantized]] = []
    attempts: list[dict[str, object]] = []
    memory = Memory()  # what rotations are learned by is the same in all steps
    for name, step in ladder(stage, limit).items():
        context.progress.log(f"  trying {name}")
        started = time.monotonic()
        made = quantize_in_memory(step, source, replace(context, scratch=_own_folder(context.scratch, name)), memory)
        lost = context.team.broadcast(_loss(made, budget))
        attempts.append({"name": name, "value": lost, "seconds": time.monotonic() - started, "kept": False})
        context.progress.log(f"  {name}: loss {lost:.4f}, allowed {limit:g} ({budget.measure})")
        tried.append((lost, made))
        if lost <= limit:
            break
    best = min(range(len(tried)), key=lambda index: tried[index][0])
    attempts[best]["kept"] = True
    lost, made = tried[best]
    warnings = list(made.warnings)
    if lost > limit:
        warnings.append(f"no quantization method meets max_drop {limit:g}; {attempts[best]['name']} has the smallest loss, {lost:.4f}")
    figures = {**made.figures, "attempts": attempts, "attempts_measure": budget.measure}
    return replace(made, figures=figures, warnings=warnings)


def _loss(quantized: Quantized, budget: Budget) -> float:
    layers: Any = {name: quantized.model.get_submodule(name) for name in quantized.scales}
    with in_int8(quantized.model, layers, quantized.scales), placed(quantized.model, *quantized.sites.forms()):
        return budget.loss(quantized.model)


def _own_folder(scratch: Path, name: str) -> Path:
    """Returns a separate folder for the training checkpoints of a step, so that two trainings do not resume from each other's."""
    return scratch / name.replace(" ", "-")
