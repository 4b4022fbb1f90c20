"""TensorRT as a rival: our exported graphs of a BERT of random weights, built for this GPU and run on torch's stream.

    TensorRT, fp16             the float graph in halves, each attention one node
    TensorRT, int8 and fp16    the same with Q/DQ around every linear layer in the blocks

Graphs are made as the stage `export` makes them (`export.graph`), plans by `foundation.standalone.tensorrt_plan`. Rows have one length and
no padding. A pass is recorded as a CUDA graph on torch's stream, so that the same events time both sides. All inputs have one scale, which
says nothing of accuracy.

Needs the packages tensorrt, onnx and onnxruntime; where one is missing, a row has the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.gpu.against_torch import eager_bert
from benchmarks.gpu.squad import Bert, Machine
from foundation.standalone import tensorrt_plan

PRECISIONS = {"TensorRT, int8 and fp16": True, "TensorRT, fp16": False}
"""Whether the layers in the blocks are int8, by rival."""
INPUT_SCALE = 0.03
TENSORRT = "tensorrt"
NOT_FUSED = "no fused kernel runs its attention"
Works = dict[tuple[int, int], Callable[[], Any]]
"""What runs a pass, by (rows, tokens)."""
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


class TorchDevice:
    """The GPU of torch, with the interface of `foundation.standalone.cuda_driver.Device`: memory and stream are torch's.

    Args:
        device: Where.
        stream: Returns the handle of the stream that launches go to.
    """

    def __init__(self, device: torch.device, stream: Callable[[], int]) -> None:
        self._device, self._stream = device, stream
        self._blocks: dict[str, Tensor] = {}

    @property
    def stream(self) -> int:
        """Handle of the current stream."""
        return self._stream()

    def block(self, name: str, num_bytes: int) -> int:
        """Returns the address of a named buffer, which grows."""
        if name not in self._blocks or len(self._blocks[name]) < num_bytes:
            self._blocks[name] = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return self._blocks[name].data_ptr()

    def upload(self, array: NDArray[Any], address: int) -> None:
        """Copies an array to a buffer."""
        values = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        self._at(address)[: len(values)].copy_(values)

    def download(self, address: int, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        """Copies an array from a buffer."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        values: NDArray[Any] = self._at(address)[:size].cpu().numpy().view(dtype).reshape(shape).copy()
        return values

    def wait(self) -> None:
        """Waits for nothing: copies and launches are in one stream."""

    def _at(self, address: int) -> Tensor:
        return next(block for block in self._blocks.values() if block.data_ptr() == address)


class Rows:
    """Rows of one length that a plan answers.

    Args:
        trt: The module of TensorRT.
        plan: The serialized engine.
        device: Memory and stream.
        ids: Tokens, int64 [b, n].
    """

    def __init__(self, trt: Any, plan: bytes, device: TorchDevice, ids: NDArray[np.int64]) -> None:
        self._plan = tensorrt_plan.Plan(trt, device, plan)  # type: ignore[arg-type]  # the same interface
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        features = {name: given[name] for name in self._plan.inputs}
        self.logits = self._plan.predict(features)
        self.run = self._plan.ready(features)


def absence() -> str | None:
    """Returns why TensorRT cannot be measured here; None where it can."""
    missing = [name for name in (TENSORRT, "onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def plans(trt: Any, bert: Bert, shapes: Sequence[tuple[int, int]], folder: Path) -> Iterator[tuple[str, bytes, str | None]]:
    """Yields the plan of every rival, with a profile for each length, and a note where no fused kernel runs its attention.

    Args:
        trt: The module of TensorRT.
        bert: Sizes.
        shapes: (rows, tokens).
        folder: Where graphs are written.

    Raises:
        PlanError: A graph does not compile.
    """
    lengths = sorted({tokens for _, tokens in shapes})
    rows = max(rows for rows, _ in shapes)
    for name, fused, plain in _graphs(bert, lengths, folder):
        try:
            yield name, tensorrt_plan.build(trt, fused, lengths, rows).plan, None
        except tensorrt_plan.PlanError:
            yield name, tensorrt_plan.build(trt, plain, lengths, rows).plan, NOT_FUSED


def _graphs(bert: Bert, lengths: Sequence[int], folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yields the half graphs of every rival: attention as one node each, and as separate products."""
    from export.graph.attention import fuse_attention
    from export.graph.half_precision import clamp_masks, float_tensors, to_half_precision
    from export.graph.onnx import export_float, save
    from export.graph.qdq import insert_qdq
    from export.graph.ranges import measure
    from foundation.artifacts.graph import Graph
    from foundation.core.target import Target
    from foundation.models.folder import Checkpoint

    random = np.random.default_rng(0)
    ids = random.integers(len(SPECIALS), bert.words, (2, lengths[0]))
    rows = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    for name, is_int8 in PRECISIONS.items():
        checkpoint = Checkpoint(_checkpoint(bert, folder / ("int8" if is_int8 else "float"), is_int8))
        target = Target(engines=("onnxruntime",), batch_sizes=(1,), sequence_lengths=tuple(lengths))
        preprocessor = checkpoint.preprocessor("text-classification", max(lengths), target)
        graph = export_float(checkpoint, preprocessor, checkpoint.folder / "float.onnx")
        if is_int8:
            graph = insert_qdq(Graph(graph), checkpoint, checkpoint.folder / "qdq.onnx")
        model = Graph(graph).load()
        clamp_masks(model)
        ranges = measure(model, float_tensors(model), [{name: rows[name] for name in preprocessor.input_names}])
        half = to_half_precision(model, ranges, "fp16").model
        fused = fuse_attention(half, ranges.largest).model
        yield name, save(fused, checkpoint.folder / "half_fused.onnx"), save(half, checkpoint.folder / "half.onnx")


def _checkpoint(bert: Bert, folder: Path, is_int8: bool) -> Path:
    """Writes a BERT of random weights with a tokenizer of numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from foundation.schemes.checkpoint import save_quantization
    from foundation.schemes.int8 import LayerScales, weight_scale

    torch.manual_seed(0)
    model = eager_bert(bert, "cpu", torch.float32)
    modules = dict(model.named_modules())
    layers = {name: one for name, one in modules.items() if isinstance(one, nn.Linear) and name.startswith("bert.encoder.layer.")}
    scales = {name: LayerScales(weight_scale(layer.weight.detach(), 127), torch.tensor(INPUT_SCALE), 8) for name, layer in layers.items()}
    if is_int8:
        for name, layer in layers.items():
            layer.weight.data = scales[name].on_grid(layer.weight.detach())
    model.save_pretrained(folder)
    words = [*SPECIALS, *(f"w{number}" for number in range(bert.words - len(SPECIALS)))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=bert.positions, **names).save_pretrained(folder)
    if is_int8:
        save_quantization(folder, scales, {"classifier": "head"})
    return folder


def answering(bert: Bert, shapes: Sequence[tuple[int, int]], machine: Machine) -> Iterator[tuple[str, Works, str | None]]:
    """Yields for every rival what answers rows of each shape, on the current GPU, as CUDA graphs, and the note of its plan.

    Args:
        bert: Sizes.
        shapes: (rows, tokens).
        machine: Where, and how a pass is recorded.

    Raises:
        PlanError: A graph does not compile, or a plan does not run.
        ImportError: A package is missing.
    """
    trt, random = importlib.import_module(TENSORRT), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for name, plan, note in plans(trt, bert, shapes, Path(folder)):
            works: Works = {}
            for rows, tokens in shapes:
                ids = random.integers(len(SPECIALS), bert.words, (rows, tokens))
                device = TorchDevice(machine.device, lambda: int(torch.cuda.current_stream(machine.device).cuda_stream))
                works[rows, tokens] = _recorded(Rows(trt, plan, device, ids), machine)
            yield name, works, note


def _recorded(rows: Rows, machine: Machine) -> Callable[[], Any]:
    logits = torch.from_numpy(rows.logits)

    def launched() -> Tensor:
        rows.run()
        return logits

    recording = machine.record(launched)

    def replayed() -> Any:
        assert rows.logits is not None  # the memory of the plan stays where it was recorded
        return recording.replay()

    return replayed
