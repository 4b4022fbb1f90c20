"""Product times: whether a product of matrices is faster without its zero slices, measured on the engine that will serve.

A gather and a scatter cost time that depends on engine, precision and sizes. So a product is built twice, whole and without its zero slices
(`export.graph.zero_slices`), as an engine of one layer. Both take turns at the rows that the layer has at the largest shape of the target.
What is left of a matrix is rounded up to sixteenths of its sides, so that similar matrices share a measurement. The user's cache keeps
measurements by engine, versions, hardware and sizes.

    worth it    time without / time whole <= 1 - `GAIN`

Limitations: a layer alone knows nothing of what the engine would fuse with its neighbours.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.engines.registry import engine_module
from export.engines.spec import BuildRequest, EngineSpec, spec_of
from export.graph.macs import count_macs
from export.graph.onnx import OPSET, save
from export.graph.zero_slices import Extent, Product, drop_zero_slices
from foundation.artifacts import exported
from foundation.artifacts.graph import Graph
from foundation.core.errors import InputError
from foundation.labels.tasks import TASKS
from foundation.machine.cached import cached_file, read_cached, write_cached
from foundation.standalone.preprocess import Preprocessor

if TYPE_CHECKING:
    from foundation.models.folder import Checkpoint
    from foundation.stage.context import Context

GAIN = 0.05
"""Share of the time that has to be saved: less is noise."""
STEPS = 16
"""Parts of a side of a matrix that sizes are rounded up to."""
IMAGE_CLASSES = "AutoModelForImageClassification"
"""Class of the models that a model of one layer resembles: pixels in, one row of numbers out."""
FULL = 0.95
"""Share of a matrix from which on nothing is measured."""


@dataclass(frozen=True)
class ProductTimes:
    """Measures products on the first engine of the target."""

    context: Context
    checkpoint: Checkpoint
    """The checkpoint of the build, for engines that look at it."""
    folder: Path
    """Existing folder for engines of one layer."""
    measured: dict[tuple[Extent, int], tuple[float, float]] = field(default_factory=dict)
    """Milliseconds whole and without zero slices, by what is left, rounded, and the number of rows."""

    def worth(self, product: Product, rows: int) -> bool:
        """Returns whether a product is faster without its zero slices.

        Args:
            product: The product.
            rows: Rows of its input at the largest shape.
        """
        extent = rounded(product.extent)
        if extent.read == 0:
            return True  # a bias takes no product
        if extent.read * extent.written > FULL * extent.inputs * extent.outputs:
            return False
        whole, without = self.of(extent, rows)
        return without <= (1 - GAIN) * whole

    def of(self, extent: Extent, rows: int) -> tuple[float, float]:
        """Returns the milliseconds of a product, whole and without its zero slices."""
        if (extent, rows) not in self.measured:
            engine, target = self.context.target.engines[0], self.context.target
            known = [engine, target.device, target.num_threads, rows, *extent]
            file = cached_file("products", {"product": known, "machine": dict(self.context.fingerprint)})
            times = read_cached(file)
            if not _are_times(times):
                times = self._measured(extent, rows)
                write_cached(file, times)
            self.measured[extent, rows] = times[0], times[1]
        return self.measured[extent, rows]

    def _measured(self, extent: Extent, rows: int) -> list[float]:
        from foundation.measure.latency import measure

        self.context.progress.log(f"    timing a product of {rows} rows: {words(extent)}")
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="products-") as scratch:
            specs = [self._engine(extent, rows, Path(scratch, name)) for name in ("whole", "without")]
            timed = measure(specs, [(1, None)], self.context.progress)
        return [row.median_ms for _, row in timed]

    def _engine(self, extent: Extent, rows: int, folder: Path) -> EngineSpec:
        """Builds an engine of one layer in a new folder, without zero slices if it is called so."""
        folder.mkdir()
        model = layer(extent, rows)
        if folder.name == "without":
            drop_zero_slices(model.graph, lambda product: True)
        one_image(rows, extent.inputs, extent.outputs).save(folder)
        context, module = self.context, engine_module(self.context.target.engines[0])
        target = context.target.model_copy(update={"batch_sizes": (1,)})
        precision = "int8" if extent.integer else "fp32"
        path = save(model, folder / "model.onnx")
        request = BuildRequest(
            engine=target.engines[0],
            checkpoint=self.checkpoint,
            model=path,
            root=folder.parent,
            folder=folder,
            shared=folder,
            precision=precision,
            float_precision="fp32",
            bf16_float_part=False,
            buckets=(),
            target=target,
            log=lambda line: None,
        )
        entry = next((entry for entry in module.build(request) if entry.runnable), None)
        if entry is None:
            raise InputError("stages.export.zeros", f"auto given, but {target.engines[0]} cannot be timed here", remedy="give multiply")
        return spec_of(folder.parent, exported.Build(precision=precision, float_precision="fp32", folder=folder.name), entry, target)


def without_zero_slices(model: Path, times: ProductTimes, preprocessor: Preprocessor) -> list[Product]:
    """Rewrites a graph file so that products leave out zero slices where the first engine is faster by it.

    Args:
        model: A float or Q/DQ graph; large tensors may be in a file of their own.
        times: Measures products.
        preprocessor: Of the build; gives the largest length.

    Returns:
        The products that changed, as they were.
    """
    graph, target = Graph(model), times.context.target
    proto = graph.load()
    sequence = max(preprocessor.buckets, default=None)
    macs = {gemm.node: gemm.macs for gemm in count_macs(graph, max(target.batch_sizes), sequence)}

    def worth(product: Product) -> bool:
        inputs, outputs = product.codes_IO.shape
        return times.worth(product, max(1, macs[product.node.name] // (inputs * outputs)))

    changed = drop_zero_slices(proto.graph, worth)
    if changed:
        save(proto, model)
    return changed


def rounded(extent: Extent) -> Extent:
    """Returns what is left of a matrix, rounded up to sixteenths of its sides."""

    def up(count: int, side: int) -> int:
        step = max(1, side // STEPS)
        return min(side, math.ceil(count / step) * step)

    return extent._replace(read=up(extent.read, extent.inputs), written=up(extent.written, extent.outputs))


def words(extent: Extent) -> str:
    """Describes what is left of a matrix, for the log."""
    precision = "int8" if extent.integer else "float"
    return f"{extent.read} of {extent.inputs} inputs, {extent.written} of {extent.outputs} outputs, {precision}"


def layer(extent: Extent, rows: int) -> onnx.ModelProto:
    """Returns a model of one layer: pixel_values float32 [batch, 1, rows, I] -> logits float32 [batch, O], the mean over the rows.

    Zeros lie where a generator puts them, as they do in a model: neighbours are not left together.

    Args:
        extent: What is left of the matrix.
        rows: Rows of the input.
    """
    random, (inputs, outputs) = np.random.default_rng(0), extent[:2]
    held_IO = _some(random, inputs, extent.read)[:, None] & _some(random, outputs, extent.written)[None, :]
    constants: dict[str, np.ndarray] = {"bias": np.ones(outputs, np.float32), "axes": np.array([1, 2], np.int64)}
    nodes, x = [], "pixel_values"
    if extent.integer:
        codes_IO = (held_IO * random.integers(1, 128, held_IO.shape)).astype(np.int8)
        constants |= {"scale": np.array(0.02, np.float32), "zero": np.array(0, np.int8), "weight.codes": codes_IO}
        constants |= {"weight.scale": np.full(outputs, 0.01, np.float32), "weight.zero": np.zeros(outputs, np.int8)}
        nodes += [
            helper.make_node("QuantizeLinear", [x, "scale", "zero"], ["codes"], "codes/QuantizeLinear"),
            helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["floats"], "floats/DequantizeLinear"),
            helper.make_node("DequantizeLinear", ["weight.codes", "weight.scale", "weight.zero"], ["weight"], "weight/DQ", axis=1),
        ]
        x = "floats"
    else:
        constants["weight"] = (held_IO * (0.5 + random.random(held_IO.shape))).astype(np.float32)
    nodes += [
        helper.make_node("MatMul", [x, "weight"], ["product"], "layer/MatMul"),
        helper.make_node("Add", ["product", "bias"], ["sum"], "layer/Add"),
        helper.make_node("ReduceMean", ["sum", "axes"], ["logits"], "mean", keepdims=0),
    ]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    given = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", 1, rows, inputs])
    answer = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", outputs])
    graph = helper.make_graph(nodes, "layer", [given], [answer], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = 10  # the newest that every engine reads
    return model


def one_image(rows: int, inputs: int, outputs: int) -> Preprocessor:
    """Returns the preprocessor of `layer`: its input has the form of a grey image."""
    image = {
        "do_resize": True,
        "size": {"height": rows, "width": inputs},
        "resample": 2,
        "do_rescale": False,
        "do_normalize": False,
        "num_channels": 1,
    }
    labels = tuple(f"output {number}" for number in range(outputs))
    task = next(name for name, facts in TASKS.items() if facts.modality == "image" and facts.auto_class == IMAGE_CLASSES)
    return Preprocessor("image", ("pixel_values",), labels, task, image=image)


def _some(random: np.random.Generator, number: int, count: int) -> np.ndarray:
    """Returns which of `number` are among `count` that are drawn, bool `[number]`."""
    chosen = np.zeros(number, bool)
    chosen[random.permutation(number)[:count]] = True
    return chosen


def _are_times(found: object) -> bool:
    """Whether something read from the cache is two positive times."""
    return isinstance(found, Sequence) and len(found) == 2 and all(isinstance(ms, float) and ms > 0 for ms in found)
