"""Tiny export artifacts: OpenVINO networks of a few kilobytes, with preprocessors for text, pairs of texts and images."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import openvino
from openvino import opset13 as ops
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from compress.artifacts.artifact import Artifact
from compress.measure.answers import save_predictions
from compress.standalone.preprocess import Preprocessor

BUCKETS, SIDE = (8, 16), 6
LABELS = ("bad", "good", "n\u00e4h")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "fine", "film", "dull", "and", "very", "long"]
TEXTS = ["a fine film", "dull", "a very long and dull film and a very fine one", "", "fine and very fine", "unheard of", "dull " * 40]
PAIRS = [("a fine film", "dull"), ("dull", ""), ("a very long film", "and a dull film")]
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


def text_preprocessor(task: str = "text-classification", buckets: tuple[int, ...] = BUCKETS) -> Preprocessor:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    labels = LABELS if task == "text-classification" else ("score",)
    return Preprocessor("text", ("input_ids", "attention_mask"), labels, task, buckets[-1], buckets, tokenizer=tokenizer)


def image_preprocessor(**changes) -> Preprocessor:
    return Preprocessor("image", ("pixel_values",), LABELS, "image-classification", image={**IMAGE, **changes})


def network(preprocessor: Preprocessor) -> openvino.Model:
    """Text: the sum of a random vector for every token that is no padding. Images: the mean of each channel."""
    classes = len(preprocessor.labels)
    if preprocessor.modality == "image":
        pixels = ops.parameter([-1, 3, SIDE, SIDE], np.float32, name="pixel_values")
        logits, inputs = ops.reduce_mean(pixels, ops.constant([2, 3]), False), [pixels]
    else:
        inputs = [ops.parameter([-1, -1], np.int64, name=name) for name in preprocessor.input_names]
        table = np.random.default_rng(0).standard_normal((len(WORDS), classes)).astype(np.float32)
        vectors = ops.gather(ops.constant(table), inputs[0], ops.constant(0))
        mask = ops.unsqueeze(ops.convert(inputs[1], "f32"), ops.constant(2))
        logits = ops.reduce_sum(ops.multiply(vectors, mask), ops.constant([1]), False)
    for value in inputs:
        value.output(0).get_tensor().set_names({value.friendly_name})
    return openvino.Model([ops.result(logits)], inputs, "tiny")


def expected(preprocessor: Preprocessor, rows) -> np.ndarray:
    """The logits of each row by itself, in its smallest bucket."""
    compiled = openvino.Core().compile_model(network(preprocessor), "CPU", PROPERTIES)
    return np.concatenate([np.array(compiled(preprocessor.encode([row]))[0]) for row in rows])


def export(root: Path, preprocessor: Preprocessor, rows, variants=(("baseline", "fp32"),), mode: str = "static") -> Artifact:
    """An export artifact with one OpenVINO engine for each variant."""
    builds = []
    for variant, precision in variants:
        folder = root / f"{variant}-{precision}"
        folder.mkdir(parents=True)
        preprocessor.save(folder)
        openvino.save_model(network(preprocessor), folder / "openvino.xml", compress_to_fp16=False)
        save_predictions(folder / "openvino.safetensors", expected(preprocessor, rows), np.zeros(len(rows), np.int64))
        engine = {
            "engine": "openvino",
            "mode": mode,
            "file": f"{folder.name}/openvino.xml",
            "runnable": True,
            "properties": PROPERTIES,
            "predictions": f"{folder.name}/openvino.safetensors",
        }
        other = {"engine": "onnxruntime", "mode": "dynamic", "file": "model.onnx", "runnable": True}
        builds.append({"variant": variant, "precision": precision, "folder": folder.name, "onnx": "model.onnx", "engines": [other, engine]})
    (root / "export.json").write_text(json.dumps({"schema": 1, "builds": builds}))
    return Artifact(root, {"digest": "0"})
