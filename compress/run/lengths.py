"""Lengths of sounds: seconds of the recipe become samples, which is what every later length of a waveform counts."""

from __future__ import annotations

from compress.core.errors import InputError
from compress.core.tasks import TASKS
from compress.models.config import build_config, read_config
from compress.models.files import find
from compress.models.sounds import settings_of, sound_steps
from compress.recipe import Recipe


def in_samples(recipe: Recipe) -> Recipe:
    """Returns a recipe whose `data.max_length` and `target.sequence_lengths` are right for its task.

    Of models that read waveforms they are samples: `data.max_seconds` times the sampling rate, and the lengths that the recipe gives, or
    that one alone where it gives none. Spectrograms have one size, so that there are no lengths. Other tasks keep theirs.

    Args:
        recipe: A checked recipe.

    Raises:
        InputError: `data.max_seconds` is given for another task, or missing, or too short; or the model reads no sounds.
    """
    seconds = recipe.data.max_seconds
    if TASKS[recipe.model.task].modality != "audio":
        if seconds is not None:
            raise InputError(f"data.max_seconds: {seconds:g} given for {recipe.model.task}; it is for sounds: leave it out")
        return recipe
    folder = None if recipe.model.path is None else find(recipe.model.path, "model.path", weights=False)
    config = build_config(recipe.model, None) if folder is None else read_config(folder, "model.path")
    steps = sound_steps(settings_of(folder, config, recipe.model.preprocessor), config, "model.preprocessor")
    if steps["kind"] == "spectrogram":
        return _with(recipe, 0, ())
    if seconds is None:
        raise InputError(f"data.max_seconds: missing; a {config.model_type} reads waveforms: give the longest sound in seconds")
    longest = round(seconds * steps["sampling_rate"])
    given = recipe.target.sequence_lengths if "sequence_lengths" in recipe.target.model_fields_set else (longest,)
    wrong = [length for length in (longest, *given) if not steps["least"] <= length <= longest]
    if wrong:
        allowed = f"{steps['least']} to {longest} samples, at {steps['sampling_rate']} a second, are allowed"
        raise InputError(f"target.sequence_lengths, data.max_seconds: {wrong[0]} samples given; {allowed}")
    return _with(recipe, longest, given)


def _with(recipe: Recipe, longest: int, lengths: tuple[int, ...]) -> Recipe:
    data, target = recipe.data.model_copy(update={"max_length": longest}), recipe.target.model_copy(update={"sequence_lengths": lengths})
    return recipe.model_copy(update={"data": data, "target": target})
