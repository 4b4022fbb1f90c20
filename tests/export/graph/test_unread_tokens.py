"""The last layer for the tokens that the head reads: against the whole graph, on models and on graphs drawn at random."""

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from export.graph.quantized import write_graphs
from export.graph.unread_tokens import MOST, drop_unread_tokens
from foundation.models.folder import Checkpoint
from tests.export import tiny_checkpoints as tiny

WIDTH = 8
Change = Callable[[onnx.GraphProto], int]
"""What narrows a graph in place, and returns how many products have fewer rows."""


def answers(model: onnx.ModelProto, features: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, features)


class Program:
    """A graph that is written one operation at a time; every tensor has its shape in value_info, as the exporter writes it."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes, self.shapes, self.constants, self.outputs = [], {"x": ["batch", "sequence", WIDTH]}, [], []
        self.integers: set[str] = set()

    def constant(self, array: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(array, f"c{len(self.constants)}"))
        return self.constants[-1].name

    def weight(self, *shape: int) -> str:
        return self.constant((self.random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32))

    def add(self, operation: str, inputs: list[str], shape: list, **attributes) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(operation, inputs, [name], f"n{len(self.nodes)}", **attributes))
        self.shapes[name] = shape
        return name

    def whole(self, operation: str, inputs: list[str], shape: list, **attributes) -> str:
        """Adds an operation on integers."""
        name = self.add(operation, inputs, shape, **attributes)
        self.integers.add(name)
        return name

    def linear(self, x: str, width: int = WIDTH) -> str:
        return self.add("MatMul", [x, self.weight(WIDTH, width)], [*self.shapes[x][:-1], width])

    def attention(self, x: str, values: str, bias: bool) -> str:
        keys = self.add("Transpose", [self.linear(values)], ["batch", WIDTH, "sequence"], perm=[0, 2, 1])
        scores = self.add("MatMul", [self.linear(x), keys], ["batch", "sequence", "sequence"])
        if bias:
            scores = self.add("Add", [scores, "bias"], ["batch", "sequence", "sequence"])
        shares = self.add("Softmax", [scores], ["batch", "sequence", "sequence"], axis=-1)
        return self.add("MatMul", [shares, self.linear(values)], ["batch", "sequence", WIDTH])

    def heads(self, x: str) -> str:
        """Splits into heads and puts together again, with sizes that are computed as the exporter does."""
        sizes = self.whole("Shape", ["x"], [3])
        two = self.whole("Slice", [sizes, *(self.constant(np.array([v])) for v in (0, 2))], [2])
        split = self.whole("Concat", [two, self.constant(np.array([2, WIDTH // 2]))], [4], axis=0)
        x = self.add("Reshape", [x, split], ["batch", "sequence", 2, WIDTH // 2], allowzero=1)
        x = self.add("Transpose", [x], ["batch", 2, "sequence", WIDTH // 2], perm=[0, 2, 1, 3])
        x = self.add("Tanh", [x], ["batch", 2, "sequence", WIDTH // 2])
        x = self.add("Transpose", [x], ["batch", "sequence", 2, WIDTH // 2], perm=[0, 2, 1, 3])
        whole = self.whole("Concat", [two, self.constant(np.array([-1]))], [3], axis=0)
        return self.add("Reshape", [x, whole], ["batch", "sequence", WIDTH])

    def steps(self, x: str, steps: list[tuple[str, int]]) -> list[str]:
        """Adds operations of `STEPS`, each with the number of an earlier tensor; returns what each made, `x` first."""
        made = [x]
        for step, earlier in steps:
            other = made[earlier % len(made)]
            match step:
                case "tanh":
                    x = self.add("Tanh", [x], self.shapes[x])
                case "norm":
                    x = self.add("LayerNormalization", [x, self.weight(WIDTH)], self.shapes[x])
                case "linear":
                    x = self.linear(x)
                case "residual":
                    x = self.add("Add", [x, other], self.shapes[x])
                case "attention" | "biased":
                    x = self.attention(x, other, step == "biased")
                case "heads":
                    x = self.heads(x)
                case "tokens":  # mixes the tokens: its rows are not computed alike
                    x = self.add("Softmax", [x], self.shapes[x], axis=1)
                case "mean":
                    mean = self.add("ReduceMean", [x, self.constant(np.array([1]))], ["batch", 1, WIDTH])
                    x = self.add("Sub", [x, mean], self.shapes[x])
            made.append(x)
        return made

    def read(self, x: str, token: int, axis: int = 1) -> None:
        shape = [size for index, size in enumerate(self.shapes[x]) if index != axis]
        self.outputs.append(self.add("Gather", [x, self.constant(np.array(token))], shape, axis=axis))

    def model(self) -> onnx.ModelProto:
        kind = TensorProto.FLOAT
        typed = [
            helper.make_tensor_value_info(name, TensorProto.INT64 if name in self.integers else kind, shape)
            for name, shape in self.shapes.items()
        ]
        inputs = [typed[0], helper.make_tensor_value_info("bias", kind, [1, "sequence", "sequence"])]
        outputs = [value for value in typed if value.name in self.outputs]
        graph = helper.make_graph(self.nodes, "random", inputs, outputs, self.constants, value_info=typed[1:])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def narrowed(model: onnx.ModelProto, change: Change = drop_unread_tokens) -> tuple[onnx.ModelProto, int]:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    products = change(made.graph)
    del made.graph.value_info[:]
    onnx.checker.check_model(made)
    return made, products


def check(model: onnx.ModelProto, least: int = 2, change: Change = drop_unread_tokens) -> int:
    """Compares the answers of a graph before a change and after it; returns how many products the change narrowed."""
    made, products = narrowed(model, change)
    for batch, length in ((1, least), (2, 5), (3, 11)):
        random = np.random.default_rng(batch)
        features = {
            "x": random.standard_normal((batch, length, WIDTH), np.float32),
            "bias": random.standard_normal((1, length, length), np.float32),
        }
        for whole, part in zip(answers(model, features), answers(made, features), strict=True):
            np.testing.assert_allclose(part, whole, rtol=1e-5, atol=1e-5)
    return products


STEPS = ("tanh", "norm", "linear", "residual", "attention", "biased", "heads", "tokens", "mean")


@pytest.mark.whole
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), max_size=8), st.integers(0, 2), st.booleans(), st.integers(0, 99))
def test_random_graphs_answer_as_before(steps, token, also_in_full, seed):
    program = Program(seed)
    made = program.steps("x", steps)
    program.read(made[-1], token)
    if also_in_full:
        program.outputs.append(made[seed % len(made)] if made[seed % len(made)] != "x" else program.linear("x"))
    check(program.model(), least=token + 1)


def layer(program: Program, x: str, bias: bool = True) -> str:
    """A layer of a Transformer: six products of its own, and four of attention."""
    x = program.add("Add", [x, program.linear(program.heads(program.attention(x, x, bias)))], program.shapes[x])
    hidden = program.add("Gelu", [program.linear(x)], program.shapes[x])
    return program.add(
        "LayerNormalization", [program.add("Add", [x, program.linear(hidden)], program.shapes[x]), program.weight(WIDTH)], program.shapes[x]
    )


def test_the_last_layer_is_narrowed_and_those_before_it_are_not():
    program = Program()
    program.read(layer(program, layer(program, "x")), 0)
    assert check(program.model(), least=1) == 6  # q, scores, their product with v, output, and two of the FFN; k and v read all tokens
    made, _ = narrowed(program.model())
    typed = _sized(made, 3, 7).graph.value_info
    rows = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in typed}
    products = [rows[node.output[0]] for node in made.graph.node if node.op_type == "MatMul" and node.output[0] in rows]
    assert sum(shape[-2] == 7 for shape in products) == 8 + 2
    assert sum(shape[-2] == 1 for shape in products) == 6


def _sized(model: onnx.ModelProto, batch: int, length: int) -> onnx.ModelProto:
    """Returns the model with sizes for names, so that every shape is known."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for value in (*made.graph.input, *made.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = {"batch": batch, "sequence": length}[dim.dim_param]
    return onnx.shape_inference.infer_shapes(made, data_prop=True)


def test_two_heads_read_two_tokens():
    program = Program()
    x = layer(program, "x")
    program.read(x, 0)
    program.read(x, 1)
    assert check(program.model()) == 6


@pytest.mark.parametrize("token", [-1, MOST, 40])
def test_other_tokens_are_no_head(token):
    program = Program()
    program.read(layer(program, "x"), token)
    assert narrowed(program.model())[1] == 0


@pytest.mark.parametrize("axis", [0, 2])
def test_rows_of_a_batch_and_columns_are_no_tokens(axis):
    program = Program()
    program.read(layer(program, "x"), 0, axis)
    assert check(program.model()) == 0


def test_what_is_read_in_full_is_computed_in_full():
    program = Program()
    x = layer(program, "x")
    program.read(x, 0)
    program.outputs.append(x)
    made, products = narrowed(program.model())
    assert products == 0
    assert [node.op_type for node in made.graph.node] == [node.op_type for node in program.model().graph.node]


def test_unknown_sizes_are_not_taken_for_equal():
    """A bias of unknown size may be broadcast, or not."""
    program = Program()
    program.read(program.add("Add", [program.linear("x"), "bias"], ["batch", "sequence", WIDTH]), 0)
    model = program.model()
    assert narrowed(model)[1] == 1
    for dim in model.graph.input[1].type.tensor_type.shape.dim:
        dim.Clear()
    assert narrowed(model)[1] == 0


@pytest.mark.whole
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_models_of_every_family_answer_as_before(family):
    whole, model = onnx.load(tiny.whole(family)), onnx.load(tiny.exported(family)[1])
    for batch, length in ((1, 1), (1, tiny.LENGTH), (4, 16)):
        features = tiny.features(family, batch, length)
        np.testing.assert_allclose(answers(model, features)[0], answers(whole, features)[0], atol=2e-6)
    assert [node.name for node in model.graph.node if node.op_type == "MatMul"] == [
        node.name for node in whole.graph.node if node.op_type == "MatMul"
    ]
    assert sum(node.op_type == "Slice" for node in model.graph.node) > sum(node.op_type == "Slice" for node in whole.graph.node)


@pytest.mark.whole
@pytest.mark.parametrize("engines", [("onnxruntime", "openvino"), ("openvino", "tensorrt")])
def test_the_engines_decide_which_tokens_are_computed(engines, tmp_path):
    folder, path = tiny.exported("bert")
    written = write_graphs(Checkpoint(folder), tiny.preprocessor("bert"), tmp_path / "model.onnx", engines)
    assert written.read_bytes() == (tiny.whole("bert") if "tensorrt" in engines else path).read_bytes()
