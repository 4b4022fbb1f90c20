"""Runs causal language models that do not fit into memory: layer by layer, with weights read from their files.

    unit        the embeddings; each decoder layer; the final norm with the head
    hidden      float32 [b, L, H] per batch: the hidden states between two units, kept for all rows

All rows pass through one unit before the next unit starts, so only one unit's weights are needed at a time. Even those are not loaded: a
linear layer is a view of its file, and a few megabytes at a time are converted to float32 (`foundation.models.layers.stored_linear`). Apart
from the hidden states and the activations of one batch in one layer, process memory does not grow with the model. The file pages belong to
the kernel, which drops them when it needs memory.

The model is split by its structure: the only `nn.ModuleList` that is not inside another one holds the decoder layers; all other modules
surround them. The model is built on the meta device. The surrounding modules are filled from the files once, each layer when it runs. A
layer's other arguments (attention mask, positions) come from the model itself: its own forward runs on the batch with placeholders for all
layers, and the placeholder of the wanted layer captures its arguments. The last placeholder returns the hidden states that the norm and
the head process.

A quantized checkpoint runs with its quantized layers; the codes of a layer are computed when it runs.

Not supported: int8 attention products and residuals (`foundation.schemes.sites`); layers that pass more than hidden states to each other;
mixtures of experts, whose three-dimensional weights would be copied; devices other than the CPU.

Shape suffixes: b rows of a batch, L positions, H channels, I inputs, O outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch
from torch import Tensor, nn

from foundation.artifacts.shards import StoredWeights, allocate, mapped
from foundation.core.errors import InputError
from foundation.machine.process import trim_memory
from foundation.models.architecture.shapes import auto_class
from foundation.models.folder import Checkpoint
from foundation.models.layers.conv1d import is_conv1d, with_linears
from foundation.models.layers.stored_linear import StoredEmbedding, StoredLinear, rows_of
from foundation.models.library import preview, quiet, task_of, with_class
from foundation.models.meta import on_meta_device
from foundation.schemes.checkpoint import QUANTIZATION_JSON, load_quantization
from foundation.schemes.int4 import Int4Scales
from foundation.standalone.preprocess import Preprocessor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BATCH_TOKENS = 256
"""Maximum tokens per batch, unless a single row has more."""
BATCH_SIZE = 32
HIDDEN_SHARE = 0.25
"""Share of the available memory; hidden states that need more are kept in a memory-mapped file."""
MODEL_SHARE = 0.5
"""Share of the available memory; a model whose float32 weights need more is streamed."""
LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

HIDDEN = "hidden_states"


class _Reached(Exception):
    """Ends a forward pass at the placeholder of the wanted layer."""


class _Placeholder(nn.Module):
    """Replaces a decoder layer; attributes that the model reads come from the layer itself."""

    def __init__(self, owner: StreamedModel, index: int, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__ |= {"_owner": owner, "_layer": layer}  # in __dict__, so that neither becomes a child module
        self.index = index

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_owner"].placeholder_output(self.index, args, kwargs)


@dataclass(frozen=True)
class Batch:
    """Rows that pass through the model together."""

    indices: list[int]
    """Indices of the rows."""
    features: Mapping[str, Tensor]
    """Inputs of the model: `input_ids`, int64 [b, L]."""
    hidden: Tensor
    """float32 [b, L, H], overwritten by each unit."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The features and the hidden states, in the format of `StreamedModel.run`."""
        return {**self.features, HIDDEN: self.hidden}


class StreamedModel:
    """A causal language model whose weights stay in their files.

    Args:
        folder: A checkpoint, float or quantized.
        key: Key path of the folder, for messages.

    Raises:
        InputError: The model is incomplete or cannot be run layer by layer; the message says why.
    """

    def __init__(self, folder: Path, key: str = "checkpoint") -> None:
        self.config = Checkpoint(folder, key).config
        self.config.use_cache = False
        self.weights = Checkpoint(folder, key).weights
        self.shape, self.transposed = meta_model(self.config)
        problem = structure_problem(self.shape)
        if problem is not None:
            raise InputError(key, f"{folder} cannot be streamed: {problem}")
        self.layers_path = decoder_layers(self.shape)
        self._stored = stored_names(self.shape, self.transposed, self.weights, f"{key}: {folder}")
        self._shapes = list(self.shape.get_submodule(self.layers_path).children())
        self._outer = copy.deepcopy(self.shape)
        placeholders = nn.ModuleList(_Placeholder(self, index, layer) for index, layer in enumerate(self._shapes))
        self._outer.set_submodule(self.layers_path, placeholders)
        self._fill(self._outer, "")
        self._outer.eval()
        self._wanted, self._last_hidden = -1, torch.zeros(0)
        self._captured: tuple[Any, dict[str, Any]] = ((), {})
        self._layers_return_tuples = False
        quantized = Checkpoint(folder).is_quantized
        self.scales: Mapping[str, Any] = load_quantization(folder)[0] if quantized else {}
        for name in (name for name in self.scales if not name.startswith(f"{self.layers_path}.")):
            raise InputError(key, f"{folder} cannot be streamed: {name} is quantized but not part of a decoder layer")
        self._folder = folder

    def __len__(self) -> int:
        """The number of decoder layers."""
        return len(self._shapes)

    def layer_name(self, index: int) -> str:
        """Returns the module path of a decoder layer."""
        return f"{self.layers_path}.{index}"

    def parameters_around(self) -> list[str]:
        """Returns the stored names of all tensors outside the decoder layers, without duplicates, in model order."""
        names = [stored for name, stored in self._stored.items() if not name.startswith(f"{self.layers_path}.")]
        return list(dict.fromkeys(names))

    def modules_around(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules outside the decoder layers that run, by name."""
        return ((name, module) for name, module in self._outer.named_modules() if not name.startswith(f"{self.layers_path}."))

    def read(self, name: str) -> Tensor:
        """Returns a parameter or persistent buffer as the model has it, in its stored dtype, read-only; of linear layers [O, I]."""
        stored = self.weights[self._stored[name]]
        return stored.T if name.removesuffix(".weight") in self.transposed else stored

    def parameters_of(self, index: int) -> list[str]:
        """Returns the names of those parameters and persistent buffers of a decoder layer that are stored under their own names."""
        return [name for name, stored in self._stored.items() if name == stored and name.startswith(f"{self.layer_name(index)}.")]

    def unit_bytes(self) -> dict[str, int]:
        """Returns the stored bytes of every decoder layer and of every tensor outside them."""
        sizes = {name: prod(self.weights.shape(name)) * self.weights.dtype(name).itemsize for name in dict.fromkeys(self._stored.values())}
        layers = {self.layer_name(index): sum(sizes[name] for name in self.parameters_of(index)) for index in range(len(self))}
        return layers | {name: sizes[name] for name in self.parameters_around()}

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Yields a decoder layer that can run; inside the block it is also at its path in `shape`."""
        name, layers = self.layer_name(index), self.shape.get_submodule(self.layers_path)
        layer = copy.deepcopy(self._shapes[index])
        self._fill(layer, f"{name}.")
        setattr(layers, str(index), layer.eval())
        try:
            for path in [path for path in self.scales if path.startswith(f"{name}.")]:
                self._quantize(layer, path, path.removeprefix(f"{name}."))
            yield layer
        finally:
            setattr(layers, str(index), self._shapes[index])

    def run(self, index: int, layer: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns the hidden states after a decoder layer, float32 [b, L, H].

        Args:
            index: Index of the layer; layer 0 must run before all others.
            layer: Result of `self.layer`.
            inputs: Features of the batch, and `HIDDEN`: float32 [b, L, H].
        """
        features = {name: value for name, value in inputs.items() if name != HIDDEN}
        args, kwargs = self.arguments(index, features)
        output = layer(inputs[HIDDEN], *args, **kwargs)
        trim_memory()  # malloc does not return free memory between blocks in use by itself
        self._layers_return_tuples = isinstance(output, tuple)
        hidden: Tensor = output[0] if self._layers_return_tuples else output
        return hidden

    def arguments(self, index: int, features: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments that the model passes to a decoder layer, without the hidden states."""
        (_, *args), kwargs = self._arguments(index, features)
        return tuple(args), kwargs

    def embed(self, features: Mapping[str, Tensor]) -> Tensor:
        """Returns the hidden states before the first decoder layer, float32 [b, L, H]."""
        hidden: Tensor = self._arguments(0, features)[0][0]
        return hidden

    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns the logits, float32 [b, L, V], for the hidden states after the last decoder layer (`HIDDEN`)."""
        self._wanted, self._last_hidden = -1, inputs[HIDDEN]
        features = {name: value for name, value in inputs.items() if name != HIDDEN}
        logits: Tensor = self._outer(**features, use_cache=False).logits
        return logits.float()

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Returns the logits, float32 [b, L, V], of one batch; reads all weights."""
        hidden = self.embed(features)
        for index in range(len(self)):
            with self.layer(index) as layer:
                hidden = self.run(index, layer, {**features, HIDDEN: hidden})
        return self.logits({**features, HIDDEN: hidden})

    def batches(
        self, preprocessor: Preprocessor, rows: Sequence[Any], scratch: Path, batch_size: int = BATCH_SIZE
    ) -> tuple[list[Batch], int]:
        """Returns batches of rows with their embeddings as hidden states, and the total bytes of the hidden states.

        Args:
            preprocessor: Prepares the rows.
            rows: Blocks of token ids.
            scratch: Folder for hidden states that are too large for memory.
            batch_size: Maximum rows per batch.
        """
        size = max(1, min(batch_size, BATCH_TOKENS // preprocessor.max_length))
        found = [
            (indices, {name: torch.from_numpy(value) for name, value in features.items()})
            for indices, features in preprocessor.batches(rows, size)
        ]
        width = self.shape.get_input_embeddings().embedding_dim  # type: ignore[operator]
        counts = [features["input_ids"].numel() for _, features in found]
        pool = hidden_pool(sum(counts) * width, scratch)
        batches, used = [], 0
        with torch.no_grad():
            for (indices, features), count in zip(found, counts, strict=True):
                first = self.embed(features)
                used += first.numel()
                if first.numel() != count * width:  # projected embeddings: the layers have another width
                    raise InputError("checkpoint", f"{self._folder} cannot be streamed: its embeddings are not as wide as its layers")
                hidden = pool[used - first.numel() : used].view(first.shape)
                batches.append(Batch(indices, features, hidden.copy_(first)))
        return batches, pool.numel() * 4

    def placeholder_output(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the output of a layer's placeholder; for the wanted layer, captures the arguments and ends the forward pass."""
        if not args:
            kwargs = dict(kwargs)
            args = (kwargs.pop(HIDDEN),)
        if index == self._wanted:
            self._captured = args, kwargs
            raise _Reached
        hidden = self._last_hidden if self._wanted < 0 and index == len(self) - 1 else args[0]
        return (hidden,) if self._layers_return_tuples else hidden

    def _arguments(self, index: int, features: Mapping[str, Tensor]) -> tuple[Any, dict[str, Any]]:
        self._wanted = index
        try:
            self._outer(**features, use_cache=False)
        except _Reached:
            return self._captured
        raise AssertionError(f"the forward of {type(self._outer).__name__} did not reach its decoder layer {index}")

    def _fill(self, module: nn.Module, prefix: str) -> None:
        """Fills a module on the meta device with weights: views of linear and embedding weights, float32 copies of all others."""
        for name, child in list(module.named_modules()):
            if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                self._fill_buffers(child, f"{prefix}{name}".rstrip("."))
        for name, child in list(module.named_modules()):
            path = f"{prefix}{name}".rstrip(".")
            if type(child) is nn.Linear:
                module.set_submodule(name, self._linear(child, path))
                continue
            for key in list(child._parameters):
                if child._parameters[key] is not None:
                    stored = self.weights[self._stored[f"{path}.{key}" if path else key]]
                    keeps = type(child) is nn.Embedding
                    child._parameters[key] = nn.Parameter(stored if keeps else _copied(stored), requires_grad=False)
            if type(child) is nn.Embedding:
                child.__class__ = StoredEmbedding

    def _fill_buffers(self, module: nn.Module, path: str) -> None:
        """Reads stored buffers; initializes the others the way Transformers does after loading."""
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty_like(buffer, device="cpu")
        self.shape._init_weights(module)  # type: ignore[operator]  # its parameters are still on the meta device
        for key in list(module._buffers):
            if f"{path}.{key}" in self._stored:
                module._buffers[key] = self.weights[self._stored[f"{path}.{key}"]].clone()

    def _linear(self, linear: nn.Linear, path: str) -> StoredLinear:
        weight = self.weights[self._stored[f"{path}.weight"]]
        bias_O = None if linear.bias is None else _copied(self.weights[self._stored[f"{path}.bias"]])
        return StoredLinear(weight.T if path in self.transposed else weight, bias_O)

    def _quantize(self, layer: nn.Module, path: str, name: str) -> None:
        stored = layer.get_submodule(name)
        if not isinstance(stored, StoredLinear):
            raise InputError(
                f"{self._folder}", f"{QUANTIZATION_JSON} names {path}, which is not a linear layer of the model", remedy="quantize again"
            )
        layer.set_submodule(name, quantized_layer(path, stored, self.scales[path], self._folder))


def meta_model(config: PreTrainedConfig) -> tuple[nn.Module, set[str]]:
    """Builds the model of a config on the meta device, with `nn.Linear` in place of `Conv1D`; returns it and the paths of those layers."""
    with on_meta_device(), quiet():
        task = task_of(config, generates=True)
        model = auto_class(task, config).from_config(with_class(config, task), dtype=torch.float32)
    transposed = {name for name, module in model.named_modules() if is_conv1d(module)}
    return with_linears(model), transposed


def structure_problem(model: nn.Module) -> str | None:
    """Returns in one line why a model cannot be run layer by layer, or None if it can."""
    lists = _outermost_lists(model)
    if len(lists) != 1:
        return f"it has {len(lists)} lists of layers ({preview(lists) or 'none'}); streaming needs exactly one list of decoder layers"
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        return "it has no language model head"
    inside = [name for name, parameter in model.named_parameters() if name.startswith(f"{lists[0]}.") and parameter.dim() > 2]
    if inside:
        return f"{inside[0]} has {model.get_parameter(inside[0]).dim()} dimensions; streaming supports matrices and vectors only"
    return None


def decoder_layers(model: nn.Module) -> str:
    """Returns the path of the list of decoder layers; the model must have no `structure_problem`."""
    return _outermost_lists(model)[0]


def _outermost_lists(model: nn.Module) -> list[str]:
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]


def stored_names(model: nn.Module, transposed: Collection[str], weights: StoredWeights, what: str) -> dict[str, str]:
    """Returns the stored name of every parameter and persistent buffer: its own name, or the name of a tensor it is tied to.

    Args:
        model: A model on the meta device whose tied parameters are one object.
        transposed: Paths of the linear layers whose weights are stored transposed.
        weights: The stored tensors.
        what: Key and folder of the model, for messages.

    Raises:
        InputError: Tensors are missing or have another shape.
    """
    named = model.state_dict(keep_vars=True)
    tied: dict[int, list[str]] = {}
    for name, value in named.items():
        tied.setdefault(id(value), []).append(name)
    stored, wrong = {}, []
    for name, value in named.items():
        found = name if name in weights else next((other for other in tied[id(value)] if other in weights), None)
        expected = tuple(value.shape)[:: -1 if name.removesuffix(".weight") in transposed else 1]
        if found is None or weights.shape(found) != expected:
            wrong.append(name)
        else:
            stored[name] = found
    if wrong:
        raise InputError(what, f"weights are missing or have another shape: {preview(wrong)}", remedy="write it again with save_pretrained")
    return stored


def quantized_layer(name: str, stored: StoredLinear, scales: Any, folder: Path) -> Any:
    """Returns the quantized layer for a stored layer whose weights are on the grid; codes are computed in parts.

    Raises:
        InputError: Scales and weights do not match.
    """
    parts = []
    for start, stop in stored.parts():
        part, found = stored.part(start, stop), rows_of(scales, start, stop)
        problem = found.problem(part.weight.detach().to(stored.weight.dtype))
        if problem is not None:
            raise InputError(f"{folder}", f"{name}: {problem}", remedy="quantize again")
        parts.append(found.module(name, part))
    whole: Any = parts[0]
    whole.weight = torch.cat([cast(Tensor, part.weight) for part in parts])
    whole.weight_scale, whole.bias = scales.weight_scale, None if stored.bias is None else stored.bias.detach()
    if isinstance(scales, Int4Scales):
        whole.weight_zero_point, whole.weight_offset = scales.weight_zero_point, scales.weight_offset
    whole.out_features = stored.out_features
    return whole


def hidden_pool(count: int, scratch: Path) -> Tensor:
    """Returns a buffer of `count` float32 values: in memory, or in a file in `scratch` if it needs more than `HIDDEN_SHARE` of memory."""
    if 4 * count <= HIDDEN_SHARE * available_bytes():
        return torch.empty(count)
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / "hidden_states"
    path.unlink(missing_ok=True)
    allocate(path, 0, 4 * count)
    pool = mapped(path, 0, (count,), torch.float32, writable=True)
    path.unlink()  # the map keeps the data until the last tensor is freed or the process ends in any way
    return pool


def available_bytes() -> int:
    """Returns the bytes that this process may use: the machine's available memory, or the limit of its control group if lower."""
    limits = [psutil.virtual_memory().available]
    for file in LIMIT_FILES:
        if file.is_file() and (text := file.read_text(encoding="ascii").strip()).isdecimal():
            limits.append(int(text))
    return min(limits)


def is_large(checkpoint: Checkpoint, share: float = MODEL_SHARE) -> bool:
    """Whether the float32 weights of a checkpoint would take more than a share of the available memory."""
    weights = checkpoint.weights
    return takes_much(sum(prod(weights.shape(name)) for name in weights.names), share)


def takes_much(parameters: int, share: float = MODEL_SHARE) -> bool:
    """Whether so many float32 weights would take more than a share of the available memory."""
    return 4 * parameters > share * available_bytes()


def _copied(stored: Tensor) -> Tensor:
    """Copies a small tensor into memory as float32."""
    return stored.to(torch.float32, copy=True)
