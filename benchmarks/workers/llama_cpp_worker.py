"""llama.cpp, in a process and an environment of its own, which `published_gguf.py` starts with `--python`.

    python benchmarks/workers/llama_cpp_worker.py MODEL.gguf REQUEST.json ANSWER.json LOGITS.npy

The request may hold `texts` (their token ids are answered), `windows` of token ids (their logits go to LOGITS.npy, float32 [N, T, V]),
`prompts` of token ids with `tokens` (that many most likely tokens after each) and `embed` (texts; their vectors, of length 1). The cache
of keys and values is float32, so that it rounds nothing. Nothing of this project is imported.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import GGML_TYPE_F32, Llama

CONTEXT, THREADS = 512, 1


def main() -> None:
    """Answers one request."""
    model, request = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    answer: dict[str, Any] = {"version": version("llama-cpp-python")}
    sizes = {"n_ctx": CONTEXT, "n_batch": CONTEXT, "n_threads": THREADS, "n_threads_batch": THREADS, "verbose": False}
    if "texts" in request:
        words = Llama(model, vocab_only=True, verbose=False)
        answer["ids"] = [words.tokenize(text.encode(), add_bos=True, special=True) for text in request["texts"]]
    if "windows" in request:
        engine = Llama(model, logits_all=True, type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32, **sizes)
        np.save(sys.argv[4], np.stack([logits(engine, ids) for ids in request["windows"]]))
        answer["greedy"] = [greedy(engine, ids, request["tokens"]) for ids in request["prompts"]]
    if "embed" in request:
        engine = Llama(model, embedding=True, **sizes)
        answer["vectors"] = [engine.embed(text, normalize=True) for text in request["embed"]]
    Path(sys.argv[3]).write_text(json.dumps(answer), encoding="utf-8")


def logits(engine: Llama, ids: list[int]) -> np.ndarray:
    """Returns the logits of a block of tokens, float32 [T, V]."""
    engine.reset()
    engine.eval(ids)
    return engine.scores[: len(ids)].astype(np.float32)


def greedy(engine: Llama, ids: list[int], count: int) -> list[int]:
    """Returns the most likely tokens after a prompt, one by one."""
    engine.reset()
    engine.eval(ids)
    found: list[int] = []
    for _ in range(count):
        found.append(int(np.argmax(engine.scores[engine.n_tokens - 1])))
        engine.eval(found[-1:])
    return found


if __name__ == "__main__":
    main()
