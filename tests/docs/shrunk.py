"""What makes the recipes of the documentation small: tiny models, generated rows, few steps, one small shape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from compress.commands.recipes import load
from compress.recipe import Recipe
from foundation.labels.candidates import Candidates
from foundation.labels.spans import Spans
from foundation.labels.tags import Tags
from tests import tiny_sounds, tiny_towers
from tests.export import sentiment
from tests.foundation import tiny_gpt
from tests.test_recipes import (
    audio_settings,
    embedding_settings,
    entity_settings,
    generation_settings,
    image_settings,
    one_step,
    question_settings,
    reranking_settings,
    text_settings,
    tower_settings,
)

VIT = {"model_type": "vit", "image_size": 8, "patch_size": 4, "num_attention_heads": 2, "intermediate_size": 64}
LLAMA = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "max_position_embeddings": 16}


def shrunk(folder: Path, path: str, given: Sequence[str]) -> list[str]:
    """Returns the options that shrink a recipe, to follow those that are given.

    Args:
        folder: Where the page runs; `input.txt` is written there.
        path: The recipe as the page names it.
        given: The options that the page gives it.
    """
    if path.endswith("recipe.lock.yaml"):  # resolved, and small already
        return []
    if not (folder / "input.txt").exists():
        (folder / "input.txt").write_text(tiny_gpt.text(400, 0), encoding="utf-8")
    settings = [value for option, value in pairwise(given) if option == "--set"]
    recipe = load(path, settings)
    small = [f"stages.{stage.id or stage.NAME}.{change}" for stage in recipe.stages for change in one_step(stage)]
    small += ["search=null"] if recipe.search is not None else []  # its values are those of the large model
    engine = recipe.target.engines[0]
    small += [f"target={{engines: [{engine}], batch_sizes: [1], sequence_lengths: [8], threads: 1}}", *_source(recipe, folder)]
    return [word for setting in small for word in ("--set", setting)]


def _source(recipe: Recipe, folder: Path) -> list[str]:
    """Returns the settings of a tiny model and tiny data; data that the page made itself stays."""
    facts, place = recipe.model.facts, folder / f"tiny-{recipe.name}"
    local = Path(recipe.data.path).exists()
    if facts.generates:
        if recipe.model.config["model_type"] == "llama":
            sizes = [f"model.config.{key}={value}" for key, value in LLAMA.items()]
            return [*sizes, "tokenizer.vocab_size=300", "data.max_length=16", "stages.quantize.group_size=32"]
        place.mkdir(exist_ok=True)
        if local:
            sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 16}
            return ["data.max_length=16", "tokenizer.vocab_size=300", *(f"model.config.{key}={value}" for key, value in sizes.items())]
        return generation_settings(recipe, place)
    if facts.two_towers:
        place.mkdir(exist_ok=True)
        finetuned = any(stage.NAME == "finetune" for stage in recipe.stages)
        source = [] if finetuned else [f"model.path={tiny_towers.checkpoint(place / 'model')}"]
        found = tower_settings(recipe, place)[0 if finetuned else 1 :]
        return [*source, *(setting for setting in found if not (local and setting.startswith("data.path")))]
    if facts.embeds:
        place.mkdir(exist_ok=True)
        return embedding_settings(recipe, place)
    by_form = {Tags: entity_settings, Spans: question_settings, Candidates: reranking_settings}
    if facts.answer.form in by_form:
        place.mkdir(exist_ok=True)
        return by_form[facts.answer.form](recipe, place)
    if recipe.data.path == "sklearn:digits":
        return ["model.config.num_hidden_layers=1", "model.config.hidden_size=48"]
    if facts.modality == "audio":
        place.mkdir(exist_ok=True)
        found = audio_settings(recipe, place)
        if recipe.model.path is None:
            return found
        task = {"path": None, "task": recipe.model.task}
        model = json.dumps({**tiny_sounds.model(tiny_sounds.waveform_config(masked=True)), **task})
        own = [] if local else found[:2]  # the page made sounds
        return [f"model={model}", "data.max_seconds=0.3", "target.sequence_lengths=[2400]", *own]
    if facts.modality == "image":
        place.mkdir(exist_ok=True)
        if recipe.model.path is None:
            return image_settings(recipe, place)
        drawn = recipe.model.model_copy(update={"path": None, "config": VIT, "init": "random"})
        model = json.dumps({"path": None, "config": VIT, "init": "random"})
        return [f"model={model}", *image_settings(recipe.model_copy(update={"model": drawn}), place)]
    if (place / "data").exists():  # the page ran this recipe before
        found = [f"model.path={sentiment.checkpoint()}", f"data.path={place / 'data'}", "data.files=null", "data.max_length=16"]
    else:
        place.mkdir(exist_ok=True)
        found = text_settings(recipe, place)
    return [setting for setting in found if not (local and setting.startswith("data.path"))]
