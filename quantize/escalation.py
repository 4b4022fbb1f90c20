"""Escalation: the cheapest way of quantizing that keeps within the goal.

    ptq  ->  smoothing and bias correction  ->  mixed precision  ->  qat  ->  qat with distillation

Every step starts from the float model again and is judged by the same loss on selection rows (`quantize.budget`). The first that loses
no more than `goals.max_drop` is taken; where none does, the one that loses least. What was tried, its loss and its price in seconds are
kept for the report.

Left out: carrying on from the step before. A smoothed model is no better start for training than the float one, and mixed precision
would hide from QAT the layers that it can mend.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from compress.models.checkpoint import load
from compress.schemes.sites import placed
from compress.stage.context import Context
from quantize.budget import Budget
from quantize.in_memory import Quantized, quantize_in_memory
from quantize.settings import MixedPrecision, QuantizeSettings
from quantize.trial import in_int8

DEFAULT_MAX_DROP = 0.01


def budget_of(context: Context) -> float:
    """Returns what may be lost: the goal `max_drop`, 1 point where there is none."""
    return DEFAULT_MAX_DROP if context.max_drop is None else context.max_drop


def ladder(stage: QuantizeSettings, max_drop: float) -> dict[str, QuantizeSettings]:
    """Returns the settings of every step by name, the cheapest first."""
    ptq = stage.model_copy(update={"mode": "ptq"})
    shifted = ptq.model_copy(update={"smoothquant": stage.smoothing or True, "bias_correction": True})
    mixed = stage.mixed_precision or MixedPrecision(max_drop=max_drop)
    learning = {"mode": "qat", "rounding": "nearest", "mixed_precision": None}
    trained = {
        name: stage.model_copy(update={**learning, "qat": stage.qat.model_copy(update={"distill": distill})})
        for name, distill in (("qat", False), ("qat with distillation", True))
    }
    return {
        "ptq": ptq.model_copy(update={"mixed_precision": None}),
        "smoothing and bias correction": shifted.model_copy(update={"mixed_precision": None}),
        "mixed precision": shifted.model_copy(update={"mixed_precision": mixed}),
        **trained,
    }


def escalate(stage: QuantizeSettings, source: Path, context: Context) -> Quantized:
    """Takes the steps of the ladder until one keeps within the goal; returns it, or the one that loses least."""
    limit = budget_of(context)
    rows = context.data.calibration(stage.calibration.rows, context.seed).rows
    budget = Budget.prepare(load(source), source, rows, context)
    tried: list[tuple[float, Quantized]] = []
    attempts: list[dict[str, Any]] = []
    for name, step in ladder(stage, limit).items():
        context.progress.log(f"  trying {name}")
        started = time.monotonic()
        made = quantize_in_memory(step, source, replace(context, scratch=_own_folder(context.scratch, name)))
        lost = _loss(made, budget)
        attempts.append({"name": name, "value": lost, "seconds": time.monotonic() - started, "kept": False})
        context.progress.log(f"  {name}: {lost:.4f}, at most {limit:g} ({budget.measure})")
        tried.append((lost, made))
        if lost <= limit:
            break
    best = min(range(len(tried)), key=lambda index: tried[index][0])
    attempts[best]["kept"] = True
    lost, made = tried[best]
    warnings = list(made.warnings)
    if lost > limit:
        warnings.append(f"no way of quantizing keeps within max_drop {limit:g}; {attempts[best]['name']} loses least, {lost:.4f}")
    figures = {**made.figures, "attempts": attempts, "attempts_measure": budget.measure}
    return replace(made, figures=figures, warnings=warnings)


def _loss(made: Quantized, budget: Budget) -> float:
    layers: Any = {name: made.model.get_submodule(name) for name in made.scales}
    with in_int8(made.model, layers, made.scales), placed(made.model, *made.sites.forms()):
        return budget.loss(made.model)


def _own_folder(scratch: Path, name: str) -> Path:
    """Returns the folder for checkpoints inside one step: two trainings in one stage must not take each other's."""
    return scratch / name.replace(" ", "-")
