"""Graphs that were traced before, for all tests that export, in all processes of a test run.

The exporter of torch takes two to four seconds for a tiny model, and makes the same graph of the same model
(`test_onnx.test_same_bytes_twice`, which asks `really` for it). Tests export the same tiny models again and again: under other names, with
other lengths, as the float part of several schemes, in each process of the tests. What decides is the model with its weights, the example
and the settings; what is made of the graph afterwards is made each time.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import onnx
import pytest
import torch
from torch import nn

SIMPLE = (bool, int, float, str, tuple, list, type(None))
LARGEST = 64_000_000
"""Bytes of the graphs that are kept."""
PLACES = ("_name_or_path", "name_or_path")
"""Where a model was loaded from."""


@contextmanager
def traced_once(folder: Path) -> Iterator[None]:
    """As long as it lasts, the graph of a model whose like was traced is read from a folder, which processes may share."""
    export = torch.onnx.export

    @functools.wraps(export)
    def export_once(model: nn.Module, example: tuple[Any, ...], **settings: Any) -> Any:
        file = folder / f"{key(model, example, settings)}.onnx"
        if file.is_file():
            return SimpleNamespace(model_proto=onnx.load(str(file)))
        program: Any = export(model, example, **settings)
        graph = program.model_proto
        if graph.ByteSize() < LARGEST:
            folder.mkdir(parents=True, exist_ok=True)
            written = folder / f"{uuid4().hex}.tmp"
            written.write_bytes(graph.SerializeToString())
            written.replace(file)  # another process sees all of it or nothing
        return SimpleNamespace(model_proto=graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", export_once)
        yield


def really(patch: pytest.MonkeyPatch) -> None:
    """Lets one test trace what it exports, whatever was traced before."""
    patch.setattr(torch.onnx, "export", torch.onnx.export.__wrapped__)  # type: ignore[attr-defined]


def key(model: nn.Module, example: tuple[Any, ...], settings: dict[str, Any]) -> str:
    """Returns the digest of all that a graph is made of: classes, settings and weights of all modules, the example, how it is exported."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    found = hashlib.sha256(repr(sorted(settings.items())).encode())
    found.update(ALL_MASK_ATTENTION_FUNCTIONS["eager"].__qualname__.encode())  # no mask is made for images
    for name, module in model.named_modules():
        found.update(f"{name} {type(module).__module__}.{type(module).__qualname__} {_settings(module)}\n".encode())
    tensors = [*model.named_parameters(), *model.named_buffers(), *((str(number), value) for number, value in enumerate(example))]
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _settings(module: nn.Module) -> str:
    """Returns what a module holds beside tensors and modules: numbers, texts, functions by name, and its config but for its folder."""
    told: dict[str, str] = {}
    for name, value in vars(module).items():
        if isinstance(value, SIMPLE) and name not in PLACES:
            told[name] = repr(value)
        elif hasattr(value, "to_dict"):
            given = {**value.to_dict(), **{key: one for key, one in vars(value).items() if isinstance(one, SIMPLE)}}
            told[name] = repr(sorted((str(key), repr(one)) for key, one in given.items() if key not in PLACES))
        elif callable(value):
            told[name] = getattr(value, "__qualname__", type(value).__qualname__)
    return repr(sorted(told.items()))
