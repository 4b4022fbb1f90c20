"""Lengths of sounds: seconds of the recipe become samples, which is what every later length of a waveform counts.

Towers read few tokens of the texts that belong to images, so that the usual lengths are cut to theirs.

What `goals.max_latency_ms` limits has to be measured: its batch sizes and lengths join the shapes of the target.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from compress.recipe import Recipe
from foundation.artifacts.safetensors import read_json
from foundation.core.errors import InputError, Problem
from foundation.core.files import local
from foundation.core.goals import LatencyGoal
from foundation.models.adapters import model_folder
from foundation.models.config import build_config
from foundation.models.folder import Checkpoint
from foundation.models.heads.towers import CAUSAL_TEXT
from foundation.models.inputs.sounds import settings_of, sound_steps
from triton_repo.triton_repo import TritonRepo


def in_samples(recipe: Recipe) -> Recipe:
    """Returns a recipe whose `data.max_length`, `target.sequence_lengths` and `target.batch_sizes` are right for its task and goals.

    Of models that read waveforms they are samples: `data.max_seconds` times the sampling rate, and the lengths that the recipe gives, or
    only that one if it gives none. Spectrograms have one size, so that there are no lengths. Other tasks keep theirs.

    Shapes that `goals.max_latency_ms` limits are added to the target, so that they are measured.

    Args:
        recipe: A checked recipe.

    Raises:
        InputError: `data.max_seconds` is given for another task, or missing, or too short; or the model reads no sounds; or a goal limits
            the latency of a shape that cannot be measured.
    """
    return _with_limited_shapes(_of_task(recipe))


def _of_task(recipe: Recipe) -> Recipe:
    seconds = recipe.data.max_seconds
    if recipe.model.facts.two_towers and seconds is None:
        return _of_towers(recipe)
    if recipe.model.facts.modality != "audio":
        if seconds is not None:
            raise InputError("data.max_seconds", f"{seconds:g} given for {recipe.model.task}", "it is for sounds", "leave it out")
        return recipe
    config, folder = _config(recipe)
    steps = sound_steps(settings_of(folder, config, recipe.model.preprocessor), config, "model.preprocessor")
    if steps["kind"] == "spectrogram":
        return _with(recipe, 0, ())
    if seconds is None:
        raise InputError("data.max_seconds", "missing", f"a {config.model_type} reads waveforms", "give the longest sound in seconds")
    longest = round(seconds * steps["sampling_rate"])
    given = recipe.target.sequence_lengths if "sequence_lengths" in recipe.target.model_fields_set else (longest,)
    wrong = [length for length in (longest, *given) if not steps["least"] <= length <= longest]
    if wrong:
        allowed = f"{steps['least']} to {longest} samples, at {steps['sampling_rate']} a second, are allowed"
        raise InputError("target.sequence_lengths, data.max_seconds", f"{wrong[0]} samples given", allowed)
    return _with(recipe, longest, given)


def _with_limited_shapes(recipe: Recipe) -> Recipe:
    """Returns a recipe whose target has the shapes of `goals.max_latency_ms`."""
    limits, target = recipe.goals.max_latency_ms, recipe.target
    problems = [
        replace(problem, key=f"goals.max_latency_ms[{number}].{problem.key}")
        for number, limit in enumerate(limits)
        for problem in (_unmeasurable(limit.sequence, recipe), _unserved(limit, recipe))
        if problem is not None
    ]
    if problems:
        raise InputError.of(problems)
    sizes = {limit.batch: None for limit in limits if limit.batch not in target.batch_sizes}
    lengths = {limit.sequence: None for limit in limits if limit.sequence not in (None, *target.sequence_lengths)}
    if not sizes and not lengths:
        return recipe
    shapes = {"batch_sizes": (*target.batch_sizes, *sizes), "sequence_lengths": (*target.sequence_lengths, *lengths)}
    return recipe.model_copy(update={"target": target.model_copy(update=shapes)})


def _unserved(limit: LatencyGoal, recipe: Recipe) -> Problem | None:
    """Returns why the latency through the server, which is asked for, cannot be measured; None where it can."""
    if limit.at == "engine":
        return None
    servers = [stage for stage in recipe.stages if isinstance(stage, TritonRepo) and stage.serve]
    if recipe.model.facts.generates:
        return Problem("at", "server given", f"answers of {recipe.model.task} are streamed token by token", "leave it out")
    if not servers or recipe.target.device != "cpu":
        remedy = "add `- triton_repo: {}` for target.device: cpu, or give at: engine"
        return Problem("at", "server given", "no stage of this recipe starts a server", remedy)
    most = servers[0].max_batch_size or limit.batch
    if limit.batch <= most:
        return None
    return Problem("batch", f"{limit.batch} given with at: server", f"stages.{servers[0].id}.max_batch_size is {most}")


def _unmeasurable(sequence: int | None, recipe: Recipe) -> Problem | None:
    """Returns why the latency at a length cannot be measured; None where it can."""
    facts = recipe.model.facts
    task, longest, target = recipe.model.task, recipe.data.max_length, recipe.target
    if not facts.has_lengths(target.sequence_lengths):
        return None if sequence is None else Problem("sequence", f"{sequence} given", f"rows of {task} have one size", "leave it out")
    if sequence is None:
        remedy = f"give the length that is limited, such as {longest}, as rows of {task} differ"
        return None if facts.two_towers else Problem("sequence", "missing", remedy=remedy)
    if facts.modality != "text":  # whose models read few lengths
        if sequence in target.sequence_lengths:
            return None
        allowed = f"{', '.join(map(str, sorted(target.sequence_lengths)))} is measured"
        return Problem("sequence", f"{sequence} given", allowed, "give one of these, or add it to target.sequence_lengths")
    if sequence <= longest:
        return None
    return Problem("sequence", f"{sequence} given", f"at most {longest} is allowed, the longest row (data.max_length)")


def _config(recipe: Recipe) -> tuple[Any, Path | None]:
    """Returns the Transformers config of the model, and its folder; None for random weights."""
    model = recipe.model
    folder = None if model.path is None else model_folder(model.path, "model.path", model.adapter)
    return (build_config(recipe.model, None) if folder is None else Checkpoint(folder, "model.path").config), folder


def _of_towers(recipe: Recipe) -> Recipe:
    """Returns a recipe whose target has lengths that the text tower reads: a causal one up to `data.max_length`, others only that
    length."""
    longest = recipe.data.max_length
    given = recipe.model.config
    raw = read_json(local(given, "model.config"), "model.config") if isinstance(given, str) else given or {}
    kind = raw.get("model_type") if recipe.model.path is None else _config(recipe)[0].model_type
    causal = CAUSAL_TEXT.get(str(kind), True)  # other types are refused later
    usual = "sequence_lengths" not in recipe.target.model_fields_set
    allowed = [length for length in recipe.target.sequence_lengths if length == longest or (causal and length < longest)]
    wrong = [length for length in recipe.target.sequence_lengths if length not in allowed]
    if wrong and not usual:
        read = f"up to {longest} tokens (data.max_length)" if causal else f"{longest} tokens alone (data.max_length)"
        raise InputError("target.sequence_lengths", f"{wrong[0]} given", f"texts of {read} are allowed")
    return _with(recipe, longest, (*allowed, longest) if longest not in allowed and usual else tuple(allowed))


def _with(recipe: Recipe, longest: int, lengths: tuple[int, ...]) -> Recipe:
    data, target = recipe.data.model_copy(update={"max_length": longest}), recipe.target.model_copy(update={"sequence_lengths": lengths})
    return recipe.model_copy(update={"data": data, "target": target})
