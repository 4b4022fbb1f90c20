"""Exports a checkpoint as one clean ONNX graph in float32, from which every engine is built.

The graph is traced by `torch.onnx.export(dynamo=True)` and then tidied, so that engines recognise its patterns and readers find their
layers:

- the attention mask becomes additive once, before the model: `bias = (1 - mask) * MASKED`, float [B, 1, 1, S]; for text-generation
  `bias = (column > row) * MASKED`, float [1, 1, S, S]. A boolean mask would leave Where and IsNaN nodes in every layer;
- attention is traced in its plain form `softmax(Q K^T * scale + bias) V`. The decomposition of scaled_dot_product_attention yields the
  same numbers with 12 Reshape, 6 Transpose, 18 Slice and 12 Concat nodes more on a model of 6 layers;
- every GEMM is named after its module: node `<module>/MatMul`, weight `<module>.weight`, metadata `module`; a convolution with a batch
  norm merged into it after the convolution; the two products of
  attention are `<module>/qk` and `<module>/pv`. Engines report these node names, and `export.graph.qdq` and `export.graph.macs` look for
  them;
- tokens that the head does not read are not computed in the last layer (`export.graph.unread_tokens`): in most classifiers all but the
first; - dropped tokens are dropped before they are computed (`export.graph.dropped_tokens`); - shapes of intermediate tensors, stack
traces, paths and unused weights are dropped: the same checkpoint gives the same bytes.

Batch is dynamic, for text the sequence too. For quantized checkpoints this is the float model on grid weights; `export.graph.qdq` makes it
int8.

A causal language model is a function of all its tokens, input_ids [B, S] -> logits [B, S, V]; `Conv1D` is made linear
(`foundation.models.layers.conv1d`). An encoder-decoder reads the source and the target after its start token, both padded to S.

Left out: the cache of keys and values that generating token by token needs, and models whose trace depends on the sequence length; the
exporter refuses those itself.
"""

from __future__ import annotations

import ast
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch
from onnx import helper
from torch import Tensor, nn
from torch.fx import config as tracing
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from export.graph import small_terms
from export.graph.dropped_tokens import select_early
from export.graph.experts import make_exportable
from export.graph.grids import put_on_grids
from export.graph.nodes import prune_initializers
from export.graph.unread_tokens import drop_unread_tokens
from foundation.core.errors import InputError
from foundation.labels.tasks import TASKS, Task
from foundation.models.adapter_files import apply_adapters
from foundation.models.architecture.shapes import auto_class
from foundation.models.folder import Checkpoint
from foundation.models.heads.towers import CAUSAL_TEXT
from foundation.models.inputs.padding import MASKED
from foundation.models.layers.conv1d import with_linears
from foundation.models.layers.experts import with_separate_experts
from foundation.models.library import one_line, quiet
from foundation.models.own_shape import SHAPE_KEY
from foundation.standalone.preprocess import ADAPTER_IDS, Preprocessor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPSET = 20
MODULE = "module"
"""Key of the metadata of a GEMM node that holds the path of its torch module."""
GEMMS = frozenset({"MatMul", "Gemm", "Conv"})
EXTERNAL_ABOVE = 2_000_000_000
"""Weights with more bytes go to a separate file: protobuf stops at 2 GiB."""
EXAMPLE_LENGTH = 7
"""Tokens of the rows that are traced: a size that no axis of a model has."""
_PREFIX = "model."


class _Text(nn.Module):
    """Takes the preprocessor's inputs by position; passes the model additive masks float [B, 1, 1, S], or the mask as it came.

    A decoder reads its own tokens besides; its mask is causal, float [1, 1, S, S].
    """

    def __init__(self, model: nn.Module, input_names: tuple[str, ...], additive: bool) -> None:
        super().__init__()
        self.model = model
        self.input_names = input_names
        self.additive = additive

    def forward(self, *inputs: Tensor) -> Tensor:
        features = dict(zip(self.input_names, inputs, strict=True))
        if self.additive:
            features["attention_mask"] = additive_padding(features["attention_mask"])
            if "decoder_input_ids" in features:
                features["decoder_attention_mask"] = _additive_causal(features["decoder_input_ids"])
        logits: Tensor = self.model(**features).logits
        return logits


class _Generation(nn.Module):
    """Takes token ids int64 [B, S]; hands the model an additive causal mask float [1, 1, S, S], or lets it make its own.

    There is no mask of padding: what comes after a token is masked anyway.
    """

    def __init__(self, model: nn.Module, input_names: tuple[str, ...], additive: bool) -> None:
        super().__init__()
        self.model = model
        self.additive = additive

    def forward(self, *inputs: Tensor) -> Tensor:
        (ids_BS,) = inputs
        mask = _additive_causal(ids_BS) if self.additive else None
        logits: Tensor = self.model(input_ids=ids_BS, attention_mask=mask).logits
        return logits


class _Texts(nn.Module):
    """Takes the texts of a model with two towers, token ids int64 [B, S]; hands a causal tower an additive mask float [1, 1, S, S]."""

    def __init__(self, model: nn.Module, causal: bool) -> None:
        super().__init__()
        self.model = model
        self.causal = causal

    def forward(self, *inputs: Tensor) -> Tensor:
        (ids_BS,) = inputs
        logits: Tensor = self.model(input_ids=ids_BS, attention_mask=_additive_causal(ids_BS) if self.causal else None).logits
        return logits


class _Numbers(nn.Module):
    """Takes pixel values float [B, C, H, W], spectrograms float [B, frames, filters], or waveforms float [B, S] and their mask, if any."""

    def __init__(self, model: nn.Module, input_names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.input_names = input_names

    def forward(self, *inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(**dict(zip(self.input_names, inputs, strict=True))).logits
        return logits


def export_float(checkpoint: Checkpoint, preprocessor: Preprocessor, out: Path, all_tokens: bool = False) -> Path:
    """Writes the float32 ONNX model of a checkpoint.

    Args:
        checkpoint: Transformers folder; of a quantized one the float module with its grid weights is taken.
        preprocessor: Provides modality and input names.
        out: The file to write. Weights of 2 GB and more go to `<out>.data` next to it.
        all_tokens: Whether the last layer computes tokens that nothing reads, too.

    Returns:
        `out`. Inputs are int64 [batch, sequence] each, or `pixel_values` float32 [batch, C, H, W], or `input_values`
        float32 [batch, sequence] or [batch, frames, filters]; the output is `logits` float32
        [batch, num_labels], or [batch, sequence or frames, vocabulary or tags].
    """
    with _quiet(), torch.no_grad():
        model, two_towers = _load(checkpoint, preprocessor.task), TASKS[preprocessor.task].two_towers
        axes: tuple[str, ...] = ("batch",)
        if preprocessor.modality == "text":
            wrapper: nn.Module = _texts(model, preprocessor)
            fixed = preprocessor.buckets[0] if two_towers and not wrapper.causal else None
            example = _text_rows(preprocessor, _vocab_size(model), min(fixed or _example_length(model), preprocessor.max_length))
            axes = ("batch",) if fixed else ("batch", "sequence")
        else:
            wrapper, example = _Numbers(model, preprocessor.input_names), _number_rows(preprocessor)
            axes = axes if preprocessor.shape else ("batch", "sequence")
        with _without_masks() if len(example) == 1 and (preprocessor.modality != "text" or two_towers) else nullcontext():
            graph = _trace(wrapper.eval(), example, preprocessor.input_names, axes)
    if not all_tokens:
        drop_unread_tokens(graph.graph)  # these need the shapes that the exporter wrote
        select_early(graph.graph)
    answered = ("batch", "frames") if preprocessor.transcribes else axes if preprocessor.per_token else axes[:1]
    return save(_tidy(graph, axes, answered), out)


def save(model: onnx.ModelProto, out: Path) -> Path:
    """Writes a model, and weights that protobuf cannot hold next to it, then has the onnx checker read it back.

    Args:
        model: The model; its large tensors are moved to the other file where there is one.
        out: The file to write; its folder is made.

    Returns:
        `out`.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    data = out.with_name(out.name + ".data")
    data.unlink(missing_ok=True)  # onnx appends to a file that exists
    external = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > EXTERNAL_ABOVE
    onnx.save_model(model, str(out), save_as_external_data=external, location=data.name if external else None)
    onnx.checker.check_model(str(out))
    return out


def additive_padding(mask_BS: Tensor) -> Tensor:
    """Returns the additive mask of padding, float32 [B, 1, 1, S], from a mask with 1 for tokens."""
    return (1.0 - mask_BS[:, None, None, :].to(torch.float32)) * MASKED


def _additive_causal(ids_BS: Tensor) -> Tensor:
    """Returns the additive causal mask, float32 [1, 1, S, S]."""
    position_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    return (position_S[None, None, None, :] > position_S[None, None, :, None]).to(torch.float32) * MASKED


def module_of(node: onnx.NodeProto) -> str | None:
    """Returns the path of the torch module that a GEMM node belongs to, or None for other nodes."""
    return next((entry.value for entry in node.metadata_props if entry.key == MODULE), None)


def _load(checkpoint: Checkpoint, task: Task) -> PreTrainedModel:
    config = checkpoint.config
    if getattr(config, "is_encoder_decoder", False) and not TASKS[task].encoder_decoder:
        raise InputError(
            "export",
            f"a {config.model_type} answers from its end token, which rows that are made up to count and to time lack",
            remedy="give a model without a decoder of its own, or leave out export",
        )
    model = auto_class(task, config).from_pretrained(
        checkpoint.folder, config=config, attn_implementation="eager", dtype=torch.float32, local_files_only=True
    )
    with_linears(model)
    if checkpoint.is_quantized:  # each expert has integers of its own
        with_separate_experts(model)
        put_on_grids(model, checkpoint)
    make_exportable(model)
    apply_adapters(model, checkpoint.folder)
    return model.eval()


def _texts(model: PreTrainedModel, preprocessor: Preprocessor) -> Any:
    """Returns the wrapper of a model, or a tower, that reads texts."""
    if TASKS[preprocessor.task].two_towers:
        return _Texts(model, CAUSAL_TEXT[model.config.model_type])
    return _wrapper(preprocessor)(model, preprocessor.input_names, _takes_additive_mask(model, preprocessor))


def _example_length(model: PreTrainedModel) -> int:
    """Returns the length of the traced rows: at least two tokens have to remain after every block, as one would become a constant."""
    shares = (getattr(model.config, SHAPE_KEY, None) or {}).get("tokens", ())
    return max(EXAMPLE_LENGTH, 2 * int(1 / min(shares, default=1.0)) + 1)


def _vocab_size(model: PreTrainedModel) -> int:
    return int(getattr(model.config, "text_config", model.config).vocab_size)


def _wrapper(preprocessor: Preprocessor) -> type[_Text] | type[_Generation]:
    return _Generation if preprocessor.generates and preprocessor.decoder_start_token_id is None else _Text


def _text_rows(preprocessor: Preprocessor, vocab_size: int, length: int) -> tuple[Tensor, ...]:
    """Returns two rows of `length` different tokens, the second one half padding, in the order of the model's inputs."""
    ids_BS = (torch.arange(2 * length) * 7919 + 1).remainder(vocab_size).reshape(2, length)
    ids_BS[ids_BS == preprocessor.pad_token_id] = (preprocessor.pad_token_id + 1) % vocab_size
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[1, (length + 1) // 2 :] = 0
    ids_BS[mask_BS == 0] = preprocessor.pad_token_id
    values = {
        "input_ids": ids_BS,
        "attention_mask": mask_BS,
        "token_type_ids": torch.zeros_like(ids_BS),
        "decoder_input_ids": ids_BS.flip(1),
        ADAPTER_IDS: torch.zeros_like(ids_BS),
    }
    return tuple(values[name] for name in preprocessor.input_names)


def _number_rows(preprocessor: Preprocessor) -> tuple[Tensor, ...]:
    """Returns two rows of numbers in the order of the model's inputs; of waveforms the second one is half padding."""
    shape = preprocessor.shape
    assert shape is not None or preprocessor.buckets, "images of one size are needed"
    if shape is not None:
        return (torch.zeros(2, *shape),)
    mask_BS = torch.ones(2, preprocessor.max_length, dtype=torch.long)
    mask_BS[1, (preprocessor.max_length + 1) // 2 :] = 0
    return (torch.sin(torch.arange(mask_BS.numel())).reshape(mask_BS.shape) * mask_BS, mask_BS)[: len(preprocessor.input_names)]


def _takes_additive_mask(model: PreTrainedModel, preprocessor: Preprocessor) -> bool:
    """Whether logits stay the same when the model gets the mask in additive form, tried at full length.

    DeBERTa reads such a mask the other way round, ModernBERT loses its sliding windows: those keep their own treatment of the mask.
    """
    rows = _text_rows(preprocessor, model.config.vocab_size, preprocessor.max_length)
    plain, additive = (_wrapper(preprocessor)(model, preprocessor.input_names, additive=additive) for additive in (False, True))
    try:
        return torch.allclose(plain(*rows), additive(*rows), atol=1e-4)
    except (ValueError, RuntimeError, IndexError, TypeError, AssertionError):  # errors that models raise for a mask of four axes
        return False


def _trace(wrapper: nn.Module, example: tuple[Tensor, ...], names: tuple[str, ...], axes: tuple[str, ...]) -> onnx.ModelProto:
    dynamic = dict.fromkeys(range(len(axes)), torch.export.Dim.DYNAMIC)
    try:
        with _without_stack_traces():
            return small_terms.traced(
                wrapper,
                example,
                dynamic_shapes=(tuple(dynamic for _ in example),),  # one entry: the variable arguments of `forward`
                input_names=list(names),
                output_names=["logits"],
                opset_version=OPSET,
            )
    except torch.onnx.OnnxExporterError as error:
        kind = wrapper.model.config.model_type  # type: ignore[union-attr]
        reason = one_line(error.__cause__ or error)
        raise InputError(
            "export", f"this {kind} cannot be traced into ONNX ({reason})", remedy="give another model, or leave out export"
        ) from error


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Lets torch record no stack trace for a node, a fifth of the time of a trace far down a stack; `_tidy` would drop them."""
    before = getattr(tracing, "do_not_emit_stack_traces", False)
    tracing.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        tracing.do_not_emit_stack_traces = before


@contextmanager
def _without_masks() -> Iterator[None]:
    """Stops Transformers from making a mask: for images it would add a tensor of zeros to the scores in every layer."""
    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = lambda **_: None
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's warnings (torchvision is not installed, a list of axes is empty, ...) and Transformers' own."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("torch.onnx", "onnx_ir"))}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _tidy(model: onnx.ModelProto, axes: tuple[str, ...], output_axes: tuple[str, ...]) -> onnx.ModelProto:
    graph = model.graph
    assert not model.functions, [function.name for function in model.functions]
    del graph.value_info[:]
    del model.metadata_props[:]
    del graph.metadata_props[:]
    graph.name, graph.doc_string, model.doc_string = "model", "", ""
    _name_axes(graph, axes, output_axes)
    _name_gemms(graph)
    prune_initializers(graph)
    return model


def _name_axes(graph: onnx.GraphProto, axes: tuple[str, ...], output_axes: tuple[str, ...]) -> None:
    for value, names in [(value, axes) for value in graph.input] + [(value, output_axes) for value in graph.output]:
        value.doc_string = ""
        del value.metadata_props[:]
        for dim, name in zip(value.type.tensor_type.shape.dim, names, strict=False):
            assert dim.HasField("dim_param"), f"{value.name}: axis {name} became the constant {dim.dim_value}"
            dim.dim_param = name


def _name_gemms(graph: onnx.GraphProto) -> None:
    """Names GEMM nodes and their weights by module, and keeps no other metadata."""
    weights = {tensor.name for tensor in graph.initializer}
    # A head that is tied to the embedding reads its weight through a Transpose: what else reads it keeps it from being folded.
    turned = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights}
    producer = {output: node.op_type for node in graph.node for output in node.output}
    renamed = {name: name.removeprefix(_PREFIX) for name in weights}
    seen: Counter[str] = Counter()
    for node in graph.node:
        path = _scope(node)
        node.doc_string = ""
        del node.metadata_props[:]
        if node.op_type not in GEMMS:
            continue
        if node.op_type == "Conv" and node.input[1] in weights:  # merged with a batch norm, it bears the scope of the norm
            path = node.input[1].removeprefix(_PREFIX).removesuffix(".weight")
        helper.set_metadata_props(node, {MODULE: path})
        weight = turned.get(node.input[1], node.input[1])
        if weight in weights:
            others = sum(name.startswith(f"{path}.weight") for other, name in renamed.items() if other != weight)
            renamed[weight] = f"{path}.weight.{others + 1}" if others else f"{path}.weight"  # experts have two in one module
            node.name = f"{path}/{node.op_type}"
        else:
            node.name = f"{path}/{'pv' if producer.get(node.input[0]) == 'Softmax' else 'qk'}"
        seen[node.name] += 1
        if seen[node.name] > 1:  # a module that runs more than once, as every layer of ALBERT does
            node.name += f".{seen[node.name]}"
    _rename(graph, renamed)


def _scope(node: onnx.NodeProto) -> str:
    """Returns the path of the innermost module that a traced node comes from, the wrapper left out."""
    found = next((entry.value for entry in node.metadata_props if entry.key == "pkg.torch.onnx.name_scopes"), "[]")
    scopes = ast.literal_eval(found)[:-1]  # the last entry is the operation itself
    return str(scopes[-1]).removeprefix(_PREFIX) if scopes else ""


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    prune_initializers(graph)  # a folded transpose leaves the unused original behind, under the name that is wanted
    for tensor in graph.initializer:
        tensor.name = names[tensor.name]
        tensor.doc_string = ""
        del tensor.metadata_props[:]
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = names.get(name, name)
    taken = [tensor.name for tensor in graph.initializer]
    assert len(taken) == len(set(taken)), sorted({name for name in taken if taken.count(name) > 1})
