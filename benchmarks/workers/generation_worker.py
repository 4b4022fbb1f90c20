"""The process of an engine of another tool; speaks as `export.engines.worker` does.

    open        spec: library, folder, threads -> versions
    generate    rows (file), decoding          -> answers, peak_memory_bytes
    score       rows (file)                    -> nll (sum over all tokens but the first of each row), tokens

Greedy answers of as many tokens as asked, end tokens or not, are all that is measured here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from export.engines.worker import Request, Tell, serve
from foundation.core.decoding import Answer
from foundation.labels.next_token import answers_of
from foundation.machine.process import peak_memory_bytes
from foundation.measure.engine_process import read_rows

Tokens = NDArray[np.int32]


class Peer(Protocol):
    """An open engine."""

    def generate(self, prompts: Sequence[Tokens], tokens: int) -> list[Answer]:
        """Returns the greedy answer to each prompt, int32 [length]."""

    def nll(self, row: Tokens) -> float:
        """Returns the negative log-likelihood of all tokens of a row but the first, summed."""


class OnnxRuntimeGenai:
    """ONNX Runtime GenAI; prompts of one length form a batch."""

    def __init__(self, folder: str, threads: int) -> None:
        os.environ["ORT_DISABLE_TELEMETRY"] = os.environ["ORT_GENAI_TELEMETRY_DISABLED"] = "1"  # read when it is imported
        import onnxruntime_genai

        self._library, self._model = onnxruntime_genai, onnxruntime_genai.Model(folder)

    def _generator(self, rows: NDArray[np.int32], length: int) -> Any:
        params = self._library.GeneratorParams(self._model)
        params.set_search_options(batch_size=len(rows), max_length=length, min_length=length, do_sample=False)
        generator = self._library.Generator(self._model, params)
        generator.append_tokens(np.array(rows))  # it asks for a writeable array
        return generator

    def generate(self, prompts: Sequence[Tokens], tokens: int) -> list[Answer]:
        """See `Peer`."""
        rows, started = np.stack(prompts), time.perf_counter()
        generator, chosen, seconds = self._generator(rows, rows.shape[1] + tokens), [], []
        for _ in range(tokens):
            generator.generate_next_token()
            chosen.append(np.array(generator.get_next_tokens()))
            seconds.append(time.perf_counter() - started)
        return [Answer((tuple(map(int, row)),), tuple(seconds)) for row in np.stack(chosen, axis=1)]

    def nll(self, row: Tokens) -> float:
        """See `Peer`."""
        logits = np.array(self._generator(row[None], len(row) + 1).get_output("logits"), np.float32)
        return float(answers_of([row], logits, len(row) - 1)[..., 0].sum())


class CTranslate2:
    """CTranslate2; a batch of prompts."""

    def __init__(self, folder: str, threads: int) -> None:
        import ctranslate2

        self._model = ctranslate2.Generator(folder, device="cpu", intra_threads=threads, inter_threads=1)
        self._words: list[str] = json.loads(Path(folder, "vocabulary.json").read_text(encoding="utf-8"))

    def _told(self, rows: Sequence[Tokens]) -> list[list[str]]:
        return [[self._words[token] for token in row] for row in rows]

    def generate(self, prompts: Sequence[Tokens], tokens: int) -> list[Answer]:
        """See `Peer`."""
        chosen: list[list[int]] = [[] for _ in prompts]
        seconds: list[list[float]] = [[] for _ in prompts]
        started = time.perf_counter()

        def heard(step: Any) -> bool:
            chosen[step.batch_id].append(step.token_id)
            seconds[step.batch_id].append(time.perf_counter() - started)
            return False

        settings = {"max_length": tokens, "min_length": tokens, "beam_size": 1, "include_prompt_in_result": False}
        self._model.generate_batch(self._told(prompts), callback=heard, **settings)
        return [Answer((tuple(mine),), tuple(times)) for mine, times in zip(chosen, seconds, strict=True)]

    def nll(self, row: Tokens) -> float:
        """See `Peer`."""
        (found,) = self._model.score_batch(self._told([row]))
        assert len(found.log_probs) == len(row) - 1, "one number for each token but the first"
        return -float(sum(found.log_probs))


PEERS = {"onnxruntime-genai": OnnxRuntimeGenai, "ctranslate2": CTranslate2}


def answer(opened: list[Peer], request: Request, tell: Tell) -> dict[str, Any]:
    """Does what one request asks; nothing is told before the answer."""
    if request["op"] == "open":
        spec = request["spec"]
        opened.append(PEERS[spec["library"]](spec["folder"], spec["threads"]))
        return {"versions": {spec["library"]: importlib.metadata.version(spec["library"])}}
    rows = [row for row in read_rows(Path(request["rows"])) if isinstance(row, np.ndarray)]
    if request["op"] == "score":
        return {"nll": sum(opened[0].nll(row) for row in rows), "tokens": sum(len(row) - 1 for row in rows)}
    answers = opened[0].generate(rows, request["decoding"]["max_tokens"])
    return {"answers": [one.message() for one in answers], "peak_memory_bytes": peak_memory_bytes()}


if __name__ == "__main__":
    serve(partial(answer, []))
