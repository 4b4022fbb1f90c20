"""Tiny export artifacts: OpenVINO networks of a few kilobytes, with preprocessors for text, pairs of texts, images and sounds."""

import json
from functools import cache
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import openvino
from onnx import TensorProto, helper, numpy_helper
from openvino import opset13 as ops
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from foundation.artifacts.artifact import Artifact
from foundation.labels.classes import ClassIds
from foundation.measure.answers import save_predictions
from foundation.standalone.preprocess import Preprocessor
from tests.tiny_sounds import encoded, wave

BUCKETS, SIDE = (8, 16), 6
LABELS = ("bad", "good", "n\u00e4h")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "fine", "film", "dull", "and", "very", "long"]
TEXTS = ["a fine film", "dull", "a very long and dull film and a very fine one", "", "fine and very fine", "unheard of", "dull " * 40]
PAIRS = [("a fine film", "dull"), ("dull", ""), ("a very long film", "and a dull film")]
SESSION = {"intra_op_num_threads": "1", "session.intra_op.allow_spinning": "0"}
PROPERTIES = {"INFERENCE_NUM_THREADS": "1", "INFERENCE_PRECISION_HINT": "f32"}
IMAGE = {
    "do_resize": True,
    "size": {"height": SIDE, "width": SIDE},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": False,
    "num_channels": 3,
    "do_convert_rgb": True,
}


def png(seed: int) -> bytes:
    pixels, file = np.random.default_rng(seed).integers(0, 256, (9, 14, 3), np.uint8), BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


IMAGES = [png(seed) for seed in range(4)]
SOUNDS = [encoded(wave("noise", seconds, np.random.default_rng(0))) for seconds in (0.03, 0.05, 0.09, 0.2)]


def text_preprocessor(task: str = "text-classification", buckets: tuple[int, ...] = BUCKETS) -> Preprocessor:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    labels = LABELS if task == "text-classification" else ("score",)
    return Preprocessor("text", ("input_ids", "attention_mask"), labels, task, buckets[-1], buckets, tokenizer=tokenizer)


def image_preprocessor(**changes) -> Preprocessor:
    return Preprocessor("image", ("pixel_values",), LABELS, "image-classification", image={**IMAGE, **changes})


def sound_preprocessor() -> Preprocessor:
    sound = {"kind": "waveform", "sampling_rate": 16000, "do_normalize": True, "least": 80}
    return Preprocessor("audio", ("input_values", "attention_mask"), LABELS, "audio-classification", 1600, (800, 1600), sound=sound)


def network(preprocessor: Preprocessor | SimpleNamespace, seed: int = 0) -> openvino.Model:
    """Text: the sum of a random vector for every token that is no padding, or each of them. Images: the mean of each channel. Sounds:
    the mean size of samples, with a factor for each class."""
    classes = len(preprocessor.labels)
    if preprocessor.modality == "image":
        pixels = ops.parameter([-1, 3, SIDE, SIDE], np.float32, name="pixel_values")
        logits, inputs = ops.reduce_mean(pixels, ops.constant([2, 3]), False), [pixels]
    elif preprocessor.modality == "audio":
        waves, mask = ops.parameter([-1, -1], np.float32, name="input_values"), ops.parameter([-1, -1], np.int64, name="attention_mask")
        kept, inputs = ops.multiply(ops.abs(waves), ops.convert(mask, "f32")), [waves, mask]
        weights = np.random.default_rng(0).standard_normal((1, classes)).astype(np.float32)
        logits = ops.multiply(ops.reduce_mean(kept, ops.constant([1]), True), ops.constant(weights))
    else:
        inputs = [ops.parameter([-1, -1], np.int64, name=name) for name in preprocessor.input_names]
        table = np.random.default_rng(seed).standard_normal((len(WORDS), classes)).astype(np.float32)
        vectors = ops.gather(ops.constant(table), inputs[0], ops.constant(0))
        mask = ops.unsqueeze(ops.convert(inputs[1], "f32"), ops.constant(2))
        logits = ops.multiply(vectors, mask)
        if not preprocessor.per_token:
            logits = ops.reduce_sum(logits, ops.constant([1]), False)
        if "adapter_ids" in preprocessor.input_names:  # each adapter adds its number
            numbers = ops.convert(inputs[preprocessor.input_names.index("adapter_ids")], "f32")
            logits = ops.add(logits, ops.reduce_max(numbers, ops.constant([1]), True))
    for value in inputs:
        value.output(0).get_tensor().set_names({value.friendly_name})
    return openvino.Model([ops.result(logits)], inputs, "tiny")


def graph(preprocessor: Preprocessor, path: Path) -> None:
    """Writes the network for text as ONNX, with its table in a file of its own."""
    table = np.random.default_rng(0).standard_normal((len(WORDS), len(preprocessor.labels))).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["vectors"], name="gather"),
        helper.make_node("Cast", ["attention_mask"], ["floats"], to=TensorProto.FLOAT, name="cast"),
        helper.make_node("Unsqueeze", ["floats", "last"], ["mask"], name="unsqueeze"),
        helper.make_node("Mul", ["vectors", "mask"], ["kept"], name="mul"),
        helper.make_node("ReduceSum", ["kept", "middle"], ["logits"], keepdims=0, name="sum"),
    ]
    constants = {"table": table, "last": np.array([2]), "middle": np.array([1])}
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "l"]) for name in preprocessor.input_names]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", len(preprocessor.labels)])]
    stored = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "tiny", inputs, outputs, stored), opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=100)


def expected(preprocessor: Preprocessor, rows, seed: int = 0) -> np.ndarray:
    """The logits of each row by itself, in its smallest bucket."""
    return np.concatenate(each(preprocessor, rows, seed))


def each(preprocessor: Preprocessor, rows, seed: int = 0) -> list[np.ndarray]:
    """The same as an array for each row."""
    answer = compiled(preprocessor.modality, preprocessor.input_names, preprocessor.labels, preprocessor.per_token, seed)
    return [np.array(answer(preprocessor.encode([row]))[0]) for row in rows]


@cache
def compiled(modality: str, input_names: tuple[str, ...], labels: tuple[str, ...], per_token: bool, seed: int) -> openvino.CompiledModel:
    """The network of such a preprocessor in the engine, once for all tests: to compile it takes longer than all of its answers."""
    alike = SimpleNamespace(modality=modality, input_names=input_names, labels=labels, per_token=per_token)
    return openvino.Core().compile_model(network(alike, seed), "CPU", PROPERTIES)


def padded(preprocessor: Preprocessor, rows, seed: int = 0) -> np.ndarray:
    """The same as one array; of tokens with zeros up to the largest bucket."""
    found = each(preprocessor, rows, seed)
    if preprocessor.per_token:
        found = [np.pad(one, ((0, 0), (0, preprocessor.max_length - one.shape[1]), (0, 0))) for one in found]
    return np.concatenate(found)


def export(
    root: Path, preprocessor: Preprocessor, rows, variants=(("baseline", "fp32"),), mode: str = "static", engine: str = "openvino"
) -> Artifact:
    """An export artifact with one engine that runs for each variant, and an entry of another that does not, before it."""
    builds = []
    for variant, precision in variants:
        folder = root / f"{variant}-{precision}"
        folder.mkdir(parents=True)
        preprocessor.save(folder)
        file = {"openvino": "openvino.xml", "onnxruntime": "model_uint8.onnx"}[engine]
        if engine == "openvino":
            openvino.save_model(network(preprocessor), folder / file, compress_to_fp16=False)
        else:
            graph(preprocessor, folder / file)
        save_predictions(folder / "openvino.safetensors", padded(preprocessor, rows), ClassIds(np.zeros(len(rows), np.int64)))
        served = {
            "engine": engine,
            "mode": mode,
            "float_precision": "fp32",
            "file": f"{folder.name}/{file}",
            "runnable": True,
            "properties": PROPERTIES if engine == "openvino" else SESSION,
            "predictions": f"{folder.name}/openvino.safetensors",
        }
        other = {"engine": "torch", "mode": "eager", "file": None, "runnable": True}
        precisions = {"precision": precision, "float_precision": "fp32"}
        builds.append({"variant": variant, **precisions, "folder": folder.name, "onnx": "model.onnx", "engines": [other, served]})
    (root / "export.json").write_text(json.dumps({"schema": 1, "builds": builds}))
    return Artifact(root, {"digest": "0"})
