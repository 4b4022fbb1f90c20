"""GPU repositories of tiny models, and `build_plans.py` run as the copy in them, with a stand-in for TensorRT and the GPUs."""

import json
import sys
import types
from pathlib import Path

import numpy as np
import onnxruntime
from google.protobuf import text_format
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tritonclient.grpc import model_config_pb2 as pb

from export.graph.onnx import export_float
from export.graph.qdq import insert_qdq
from foundation.artifacts.graph import Graph
from foundation.models.folder import Checkpoint
from foundation.standalone.preprocess import Preprocessor
from tests.export import tiny_checkpoints as tiny
from tests.export.tensorrt_stand_in import Driver, StandIn
from triton_repo.gpu import plans
from triton_repo.gpu.configs import Serving
from triton_repo.gpu.plans import Golden, Plans
from triton_repo.gpu.settings import Gpu

BUCKETS, LARGEST, NAME = (8, 16), 4, "tiny"
COMPILED = {}
"""What the library has compiled in this process, for `StandIn`."""
SCRIPTS = (
    "build_plans.py",
    "tensorrt_plan.py",
    "tensorrt_layers.py",
    "cuda_driver.py",
    "tolerance.py",
    "measure_plans.py",
    "plan_files.py",
)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "fine", "film", "dull", "and", "very", "long"]
ROWS = ["a fine film", "dull", "a very long and dull film", "fine and very very very very long film", "", "a", "very dull film and a"]
PAIRS = [("a fine film", "dull"), ("dull", "a very long film and a dull film")]


def text_preprocessor(labels=("bad", "good", "n\u00e4h"), task="text-classification") -> Preprocessor:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = ("input_ids", "attention_mask", "token_type_ids")
    return Preprocessor("text", names, labels, task, BUCKETS[-1], BUCKETS, tokenizer=tokenizer)


def quantized_graph(folder: Path) -> Path:
    """A tiny BERT with Q/DQ at every encoder linear."""
    prepared = tiny.write(folder / "float", "bert")
    names = [name for name in tiny.linears(tiny.load(folder / "float", "bert")) if ".encoder." in name]
    quantized = tiny.quantize(folder / "float", "bert", dict.fromkeys(names, 0.05), folder / "quantized")
    return insert_qdq(
        Graph(export_float(Checkpoint(quantized), prepared, folder / "float.onnx")), Checkpoint(quantized), folder / "model.onnx"
    )


def logits_of(graph: Path, preprocessor: Preprocessor, rows) -> np.ndarray:
    session, logits = onnxruntime.InferenceSession(str(graph)), np.zeros((len(rows), 3), np.float32)
    for indices, features in preprocessor.batches(rows, 4):
        logits[indices] = session.run(["logits"], features)[0]
    return logits


def write(out, graph, preprocessor, rows, logits, largest=LARGEST, *, gpu=None, serving=None, rival=None, **more):
    """Writes a repository; what is not given has its default."""
    given = Plans(graph, **({} if rival is None else {"rival": rival}), gpu=gpu or Gpu(), **more)
    serving = {"max_batch_size": largest, "batch_sizes": (1,), "groups": given.gpu.groups, **(serving or {})}
    return plans.write_gpu_repository(out, given, preprocessor, Golden(rows, logits), name=NAME, serving=Serving(**serving))


def config(path: Path):
    return text_format.Parse(path.read_text(), pb.ModelConfig())


def tensors(values):
    return {value.name: (value.data_type, list(value.dims)) for value in values}


def build_script(out: Path):
    """Loads the copied build_plans.py with the modules that lie beside it, and nothing of ours."""
    sys.path.insert(0, str(out))
    try:
        script = types.ModuleType("build_plans_copy")  # as python3 runs a script: it is itself never written as byte code
        exec(compile((out / "build_plans.py").read_text(), str(out / "build_plans.py"), "exec"), script.__dict__)
        measure = sys.modules["measure_plans"]  # shorter: nothing here reads a time
        measure.ROUNDS, measure.MIN_SAMPLES, measure.MAX_SAMPLES, measure.WARM_UP, measure.RATE_SECONDS = 2, 2, 4, 1, 0.01
        return script
    finally:
        sys.dont_write_bytecode = False
        sys.path.remove(str(out))
        for name in SCRIPTS:
            sys.modules.pop(name.removesuffix(".py"), None)


def build(out: Path, *capabilities: str, spoil=lambda logits, batch: logits):
    """Builds for GPUs of these capabilities; returns the status, what was said, and the stand-in."""
    lines, stand_in = [], StandIn(spoil, COMPILED)
    script, sys.dont_write_bytecode = build_script(out), True  # as the script has it for itself
    try:
        return script.run(out, stand_in, Driver(*capabilities), lines.append), lines, stand_in
    finally:
        sys.dont_write_bytecode = False


def record_of(out: Path) -> dict:
    return json.loads((out / "plans.json").read_text())
