"""sentence-transformers and its own int8, in a process of its own, which `embeddings.py` starts with `--packages` on its import path.

    python benchmarks/workers/sentence_transformers_worker.py export MODEL SENTENCES.txt OUT
    python benchmarks/workers/sentence_transformers_worker.py serve

`export` writes OUT/onnx and OUT/openvino, each with the float and the int8 model, by the functions that its documentation names:
`export_dynamic_quantized_onnx_model` for avx512_vnni, and `export_static_quantized_openvino_model` with SENTENCES.txt, one a line, as
calibration rows. `serve` answers the requests of `foundation.measure.engine_process`: it opens one of these models, answers rows with
vectors, and times `model.forward` on tokens, its pooling and normalization included, as ours are part of the graph.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer

from export.engines.worker import WARM_UP_CALLS, serve, synthetic
from foundation.machine.process import peak_memory_bytes
from foundation.measure.engine_process import read_rows
from foundation.standalone.preprocess import Preprocessor

ONNX_INT8, OPENVINO_INT8 = "onnx/model_qint8_avx512_vnni.onnx", "openvino/openvino_model_qint8_quantized.xml"
"""Files that the functions of sentence-transformers write."""


def main() -> None:
    """Exports, or serves until the input ends."""
    if sys.argv[1] == "export":
        model, sentences, out = map(Path, sys.argv[2:5])
        export(model, sentences, out)
    else:
        serve(lambda request, tell: Opened.answer(request))


def export(model: Path, sentences: Path, out: Path) -> None:
    """Writes every model that is compared."""
    from optimum.intel import OVQuantizationConfig
    from sentence_transformers import export_dynamic_quantized_onnx_model, export_static_quantized_openvino_model

    runtime = SentenceTransformer(str(model), backend="onnx", model_kwargs={"export": True, "provider": "CPUExecutionProvider"})
    runtime.save_pretrained(str(out))
    export_dynamic_quantized_onnx_model(runtime, "avx512_vnni", str(out))
    openvino = SentenceTransformer(str(model), backend="openvino", model_kwargs={"export": True})
    openvino.save_pretrained(str(out))
    rows = sentences.read_text(encoding="utf-8").splitlines()
    folder = out / "calibration"
    folder.mkdir(exist_ok=True)
    (folder / "train.json").write_text("".join(json.dumps({"sentence": row}) + "\n" for row in rows), encoding="utf-8")
    export_static_quantized_openvino_model(
        openvino,
        OVQuantizationConfig(num_samples=len(rows)),
        str(out),
        dataset_name=str(folder),
        dataset_config_name="default",
        dataset_split="train",
        column_name="sentence",
    )


class Opened:
    """One open model, and the rows it understands."""

    one: Opened

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec = spec
        torch.set_num_threads(spec["threads"])
        arguments: dict[str, Any] = {} if spec["backend"] == "torch" else {"file_name": Path(spec["file"]).name}
        if spec["backend"] == "onnx":
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = spec["threads"]
            arguments |= {"provider": "CPUExecutionProvider", "session_options": options}
        if spec["backend"] == "openvino":
            arguments |= {"ov_config": {"INFERENCE_NUM_THREADS": str(spec["threads"]), "INFERENCE_PRECISION_HINT": "f32"}}
        self.model = SentenceTransformer(spec["model"], backend=spec["backend"], model_kwargs=arguments, device="cpu")
        self.model.max_seq_length = spec["max_length"]
        self.preprocessor = Preprocessor.load(Path(spec["folder"]))

    @classmethod
    def answer(cls, request: Mapping[str, Any]) -> dict[str, Any]:
        """Does what one request asks."""
        if request["op"] == "open":
            cls.one = cls(request["spec"])
            return {"versions": {"sentence-transformers": importlib.metadata.version("sentence-transformers")}}
        return cls.one.predict(request) if request["op"] == "predict" else cls.one.measure(request)

    def predict(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the vectors of all rows, as `encode` makes them."""
        rows = read_rows(Path(request["rows"]))
        vectors = self.model.encode([str(row) for row in rows], batch_size=request["batch_size"], convert_to_numpy=True)
        save_file({"logits": np.ascontiguousarray(vectors, np.float32)}, request["out"])
        return {"n": len(rows), "placement": self.placement()}

    def measure(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Times single calls on the made-up tokens that our engines are timed with."""
        made = synthetic(self.preprocessor, request["batch"], request["sequence"])
        samples: list[float] = []
        for _ in range(WARM_UP_CALLS):
            self._time(made)
        while len(samples) < request["most"] and (len(samples) < request["least"] or sum(samples) < request["seconds"]):
            samples.append(self._time(made))
        found = {"samples_ms": [1e3 * sample for sample in samples], "peak_memory_bytes": peak_memory_bytes()}
        return {**found, "placement": self.placement()}

    def placement(self) -> dict[str, str]:
        """Where it runs; the float part of all of them is float32, as they are opened."""
        return {"device": "cpu", "provider": self.spec["backend"], "float_precision": "fp32"}

    def _time(self, made: Mapping[str, Any]) -> float:
        features = {name: torch.from_numpy(values) for name, values in made.items()}
        started = time.perf_counter()
        with torch.inference_mode():
            self.model.forward(features)
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
