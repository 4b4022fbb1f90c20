"""Graphs that were traced before, for all tests that export, in all processes of a test run.

The exporter of torch takes two to four seconds for a tiny model, and makes the same graph of the same model
(`test_onnx.test_a_second_trace_...` asks `really` for it). Tests export the same tiny models again and again: under other names, with other
lengths, as the float part of several schemes, in each process of the tests, in each test run (`tests.cached_folder`). What decides is the
model with its weights, the example and the settings; what is made of the graph afterwards is made each time.

A model that differs in its weights alone, as the int8 variant of a run does, has the same graph with other weights: they are put in where
each of them is found as it is, or turned, in the graph that was traced. `test_traced_once.py` compares that with traces. It is not done
where a graph holds anything that is made of weights. Weights that are alike or all the same, which the exporter merges or leaves out, have
to be equal.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from export.graph import small_terms
from tests import quick_traces

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "numpy")
SOURCES = ("export/graph", "foundation/models", "foundation/schemes", "tests/traced_once.py", "tests/quick_traces.py")
"""What runs while a model is traced, but for the modules of the model."""
SIMPLE = (bool, int, float, str, tuple, list, type(None))
LARGEST = 16_000_000
"""Parameters of the models whose graphs are kept."""
FLOAT = onnx.TensorProto.FLOAT
UNREAD = frozenset(
    ("_name_or_path", "name_or_path", "id2label", "label2id", "problem_type", "architectures", "initializer_range", "initializer_factor")
)
"""What a config says that no graph is made of: where a model was loaded from, names of labels, the loss, and how weights are drawn."""
DROPOUT = re.compile(r"^p$|dropout|_pdrop$|layerdrop$")
"""Shares of what is left out in training, which graphs of other models do not read."""


@contextmanager
def traced_once(folder: Path) -> Iterator[None]:
    """As long as it lasts, the graph of a model whose like was traced is read from a folder, which processes may share."""
    export = small_terms.traced

    @functools.wraps(export)
    def export_once(model: nn.Module, example: tuple[Any, ...], **settings: Any) -> onnx.ModelProto:
        if sum(weight.numel() for weight in model.parameters()) > LARGEST:
            return export(model, example, **settings)
        weights = weights_of(model)
        apart = apart_in(weights)
        rest = {name: weight for name, weight in weights.items() if name not in apart}
        name = key(model, example, settings)
        file, alike = folder / f"{name}-{digest(weights)}", folder / f"{name}-like-{digest(rest)}"
        for known in (file, alike):
            if known.is_file():
                graph, places = pickle.loads(known.read_bytes())
                return with_weights(onnx.load_from_string(graph), places, weights)
        quick_traces.share()
        traced = export(model, example, **settings)
        graph, places = traced.SerializeToString(), places_of(traced, model, apart)
        _write(file, (graph, {}))
        if places is not None:
            _write(alike, (graph, places))
        return traced

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_terms, "traced", export_once)
        yield


def really(patch: pytest.MonkeyPatch) -> None:
    """Lets one test trace what it exports, whatever was traced before."""
    patch.setattr(small_terms, "traced", small_terms.traced.__wrapped__)  # type: ignore[attr-defined]


def weights_of(model: nn.Module) -> dict[str, np.ndarray]:
    """Returns the parameters by name."""
    return {name: weight.detach().cpu().contiguous().numpy() for name, weight in model.named_parameters()}


def apart_in(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the float32 weights of several values or of a single one that is no round number, which are unlike every other one."""
    often = Counter(weight.tobytes() for weight in weights.values())

    def is_apart(weight: np.ndarray) -> bool:
        several = weight.dtype == np.float32 and weight.size and weight.min() < weight.max()
        single = weight.dtype == np.float32 and weight.size == 1 and float(weight.flat[0]) % 0.5
        return bool(several or single) and often[weight.tobytes()] == 1

    return {name: weight for name, weight in weights.items() if is_apart(weight)}


Places = dict[str, tuple[str, bool]]
"""By the name of a tensor of a graph the parameter that it is, and whether it is turned."""


def places_of(graph: onnx.ModelProto, model: nn.Module, apart: dict[str, np.ndarray]) -> Places | None:
    """Returns where a graph has weights that are apart; None where it has numbers that may be made of them."""
    known: dict[bytes, tuple[str, bool]] = {}
    for name, weight in apart.items():
        known |= {weight.T.tobytes(): (name, True)} if weight.ndim == 2 else {}
        known[weight.tobytes()] = name, False
    rest = [weight for name, weight in weights_of(model).items() if name not in apart]
    rest += [weight.T for weight in rest if weight.ndim == 2]
    kept = {weight.tobytes() for weight in (*rest, *(buffer.detach().cpu().contiguous().numpy() for buffer in model.buffers()))}
    places = {
        tensor.name: known[tensor.raw_data] for tensor in graph.graph.initializer if tensor.data_type == FLOAT and tensor.raw_data in known
    }
    attributes = [attribute for node in graph.graph.node for attribute in node.attribute]
    if any(attribute.HasField("g") or len(attribute.floats) > 1 for attribute in attributes):
        return None
    constants = [attribute.t for attribute in attributes if attribute.HasField("t")]
    for tensor in (*(one for one in graph.graph.initializer if one.name not in places), *constants):
        value = numpy_helper.to_array(tensor)
        drawn = value.dtype.kind == "f" and value.size > 1 and (value % 0.5).any()  # round numbers are of the code
        if drawn and value.tobytes() not in kept:
            return None
    return places


def with_weights(graph: onnx.ModelProto, places: Places, weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Puts weights where they belong, in place."""
    for tensor in graph.graph.initializer:
        if tensor.name in places:
            name, turned = places[tensor.name]
            tensor.raw_data = (weights[name].T if turned else weights[name]).tobytes()
    return graph


def digest(weights: dict[str, np.ndarray]) -> str:
    """Returns the digest of weights."""
    found = hashlib.sha256()
    for name, weight in weights.items():
        found.update(f"{name} {weight.dtype} {weight.shape}\n".encode())
        found.update(weight.tobytes())
    return found.hexdigest()


def _write(file: Path, content: Any) -> None:
    """Another process sees all of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f"{uuid4().hex}.tmp")
    written.write_bytes(pickle.dumps(content))
    written.replace(file)


def key(model: nn.Module, example: tuple[Any, ...], settings: dict[str, Any]) -> str:
    """Returns the digest of all that a graph is made of but weights: classes and settings of modules, the example, how it is exported."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    found = hashlib.sha256(repr(sorted(settings.items())).encode())
    found.update(ALL_MASK_ATTENTION_FUNCTIONS["eager"].__qualname__.encode())  # no mask is made for images
    for name, module in model.named_modules():
        found.update(f"{name} {type(module).__module__}.{type(module).__qualname__} {_settings(module)}\n".encode())
        found.update(_source(type(module).__module__))
    for name, weight in model.named_parameters():
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
    for name, tensor in [*model.named_buffers(), *((str(number), value) for number, value in enumerate(example))]:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@functools.cache
def _source(module: str) -> bytes:
    """Returns the digest of a module of this project: of its stages and tests, which no version stands for."""
    file = Path(getattr(sys.modules.get(module), "__file__", None) or ROOT.parent)
    return hashlib.sha256(file.read_bytes()).digest() if file.is_relative_to(ROOT) and "site-packages" not in file.parts else b""


def _settings(module: nn.Module) -> str:
    """Returns what a module holds beside tensors and modules: numbers, texts, functions by name, and its config but for its folder."""
    told: dict[str, str] = {}

    def read(name: str) -> bool:
        return name not in UNREAD and (module.training or not DROPOUT.search(name))

    for name, value in vars(module).items():
        if isinstance(value, SIMPLE):
            told |= {name: repr(value)} if read(name) else {}
        elif hasattr(value, "to_dict"):
            given = {**value.to_dict(), **{key: one for key, one in vars(value).items() if isinstance(one, SIMPLE)}}
            told[name] = repr(sorted((str(key), repr(one)) for key, one in given.items() if read(str(key))))
        elif callable(value):
            told[name] = getattr(value, "__qualname__", type(value).__qualname__)
    return repr(sorted(told.items()))
