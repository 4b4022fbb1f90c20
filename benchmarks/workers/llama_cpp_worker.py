"""llama.cpp, in a process and an environment of its own, which `gguf_files.py` starts with `--python`.

    python benchmarks/workers/llama_cpp_worker.py MODEL.gguf REQUEST.json ANSWER.json

The request may hold `texts` (their token ids are answered), `windows` of token ids (the sum of the negative log-likelihoods of each),
`prompts` of token ids with `tokens` (that many most likely tokens after each) and `embed` (texts; their vectors, of length 1).
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import Llama

CONTEXT, THREADS = 512, 2


def main() -> None:
    """Answers one request."""
    model, request = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    answer: dict[str, Any] = {"version": version("llama-cpp-python")}
    if "texts" in request:
        words = Llama(model, vocab_only=True, verbose=False)
        answer["ids"] = [words.tokenize(text.encode(), add_bos=True, special=True) for text in request["texts"]]
    if "windows" in request:
        engine = Llama(model, n_ctx=CONTEXT, n_batch=CONTEXT, n_threads=THREADS, logits_all=True, verbose=False)
        answer["losses"] = [loss(engine, ids) for ids in request["windows"]]
        answer["greedy"] = [greedy(engine, ids, request["tokens"]) for ids in request["prompts"]]
    if "embed" in request:
        engine = Llama(model, n_ctx=CONTEXT, n_batch=CONTEXT, n_threads=THREADS, embedding=True, verbose=False)
        answer["vectors"] = [engine.embed(text, normalize=True) for text in request["embed"]]
    Path(sys.argv[3]).write_text(json.dumps(answer), encoding="utf-8")


def loss(engine: Llama, ids: list[int]) -> float:
    """Returns the negative log-likelihood of the tokens of a window after the first."""
    engine.reset()
    engine.eval(ids)
    logits = engine.scores[: len(ids) - 1].astype(np.float64)
    largest = logits.max(axis=1)
    total = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    return float((total - logits[np.arange(len(ids) - 1), ids[1:]]).sum())


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
