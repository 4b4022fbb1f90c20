"""Rotates a language model that need not fit into memory: from its files into a folder of float32 weights.

    observe      one row runs through the model layer by layer: which norm each layer reads, and the logits
    write        each weight that changes is read, folded, rotated and written as float32; the others are copied as stored
    compare      the same row runs through the new folder

Memory holds one weight in float64, and of tables of embeddings a part (`quantize.rotation.rotation`). The folder takes 4 bytes for each
weight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundation.artifacts.artifact import write_json
from foundation.artifacts.shards import ShardWriter
from foundation.models.architecture.attention import probe
from foundation.models.architecture.residual import Readers, Stream
from foundation.models.architecture.structure import Structure
from foundation.models.files import TEXT_FILES, copy_files
from foundation.models.streaming import HIDDEN, StreamedModel
from quantize.rotation.rotation import Rotations, added, check_same, difference_of, figures_of, try_rotation, untie

FILES = (*TEXT_FILES, "config.json", "generation_config.json", "README.md")


def rotate_folder(source: Path, out: Path, seed: int, key: str) -> dict[str, object]:
    """Rotates a checkpoint from file to file.

    Args:
        source: The float checkpoint of a causal language model.
        out: Folder to write; made if it is missing.
        seed: Seed of the rotations.
        key: Key path of the setting, for messages.

    Returns:
        The figures of `rotation.rotate`.

    Raises:
        InputError: The model cannot be streamed or rotated, or answers differently afterwards.
    """
    model = StreamedModel(source)
    shape: Any = model.shape
    values = try_rotation(shape.config, key)
    structure = Structure.of(shape, key)
    features = probe(shape, torch.Generator().manual_seed(seed))
    readers = Readers(shape, structure)
    with torch.no_grad():
        expected = _observed(model, readers, features)
    rotations = Rotations.of(shape, structure, Stream.of(shape, structure, readers.found), seed, values=values)
    names = [*model.parameters_around(), *(name for index in range(len(model)) for name in model.parameters_of(index))]
    own = untie(shape, rotations, model.read)
    out.mkdir(parents=True, exist_ok=True)
    _write(model, rotations, [*names, *(name for group in own for name in sorted(group) if name not in names)], out)
    copy_files(source, out, FILES)
    if own:
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
        write_json(out / "config.json", {**config, "tie_word_embeddings": False})
    with torch.no_grad():
        difference = difference_of(StreamedModel(out).forward(features), expected)
    check_same(difference, shape.config, key)
    return figures_of(structure, values, added(shape, own), difference)


def _observed(model: StreamedModel, readers: Readers, features: dict[str, Tensor]) -> Tensor:
    """Returns the logits of a row, during which `readers` sees every module."""
    hidden = model.embed(features)
    for index in range(len(model)):
        name = model.layer_name(index)
        with model.layer(index) as layer, readers.watch((f"{name}.{inner}", module) for inner, module in layer.named_modules()):
            hidden = model.run(index, layer, {**features, HIDDEN: hidden})
    with readers.watch(model.modules_around()):
        return model.logits({**features, HIDDEN: hidden})


def _write(model: StreamedModel, rotations: Rotations, names: list[str], out: Path) -> None:
    """Writes weights under these names: float32 where they change, else as stored."""
    changed = set(rotations.changed(names))
    writer = ShardWriter(out, names)
    for name in names:
        if name not in changed:
            writer.copy(name, model.weights[name])
            continue
        weight = model.read(name)
        transposed = name.removesuffix(".weight") in model.transposed
        target = writer.new(name, weight.shape[::-1] if transposed else weight.shape, torch.float32)
        rotations.write(name, model.read, target.T if transposed else target)
    writer.close()
