"""Builds models again from their configs, uncut, and compares their logits with those of their source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distill.choices import Student
from distill.student import take_layers
from foundation.core.errors import InputError
from foundation.labels.tasks import TASKS
from foundation.models.architecture.shapes import remade
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load, save
from foundation.models.inputs.images import image_shape
from foundation.models.library import quiet
from prune.surgery import KeptUnits, shrink
from tests.architectures.table import VOCABULARY, Architecture

KEY = "stages.student"


def logits(model: Any, architecture: Architecture) -> torch.Tensor:
    """Returns the logits of a row."""
    generator = torch.Generator().manual_seed(0)
    if TASKS[architecture.task].modality == "image":
        features = {"pixel_values": torch.randn(1, *image_shape(model.config), generator=generator)}
    else:
        ids = torch.randint(4, VOCABULARY, (1, 12), generator=generator)
        ids[:, -1] = 2  # the end, which some heads look for
        features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if TASKS[architecture.task].encoder_decoder:
            features["decoder_input_ids"] = torch.randint(4, VOCABULARY, (1, 5), generator=generator)
    torch.manual_seed(0)  # some attentions draw random projections
    with torch.inference_mode():
        answer: torch.Tensor = model(**features).logits
    return answer


def tied(model: nn.Module) -> list[set[str]]:
    """Returns the names of each parameter that has several."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return [group for group in names.values() if len(group) > 1]


def part(model: nn.Module) -> None:
    """Gives every name of a parameter that is not one module under several names a parameter of other values, in place."""
    seen: dict[int, nn.Module] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and seen.setdefault(id(parameter), module) is not module:
                setattr(module, name, nn.Parameter(parameter.detach().flip(0)))


def rebuilt(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields every kind of model that is built from the config of a model and filled with all of its weights."""
    made = remade(model, model.config)
    made.load_state_dict(model.state_dict())
    yield "remade", made.eval()
    with suppress(InputError, NotImplementedError):  # what cannot be cut is not built again
        structure = Structure.of(model, KEY)
        yield "student", take_layers(model, Student().chosen([stack.depth for stack in structure.stacks], KEY), KEY)
        yield "pruned", shrink(model, structure, KeptUnits.everything(structure.sizes), KEY)


def difference(architecture: Architecture, drawn: nn.Module, folder: Path) -> str | None:
    """Returns what of a model that is built again differs from its source; None where nothing does.

    Args:
        architecture: What the model is.
        drawn: The model.
        folder: Empty folder; the source is what a checkpoint written there loads as.
    """
    for name in ("source", "saved"):
        (folder / name).mkdir()
    with quiet():
        drawn.save_pretrained(folder / "source")  # type: ignore[operator]
    source = load(folder / "source")
    expected = logits(source, architecture)

    def same(model: nn.Module) -> bool:  # sums depend on where weights lie in memory
        return torch.allclose(logits(model, architecture), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))

    if not same(drawn):
        return "the loaded model gives other logits than the drawn one"
    for name, made in rebuilt(source):
        if not same(made):
            return f"{name}: other logits"
        if sorted(map(sorted, tied(made))) != sorted(map(sorted, tied(source))):
            return f"{name}: tied otherwise"
        save(made, folder / "source", folder / "saved", name)
        if not same(load(folder / "saved")):
            return f"{name}: other logits once saved and loaded"
    return None
