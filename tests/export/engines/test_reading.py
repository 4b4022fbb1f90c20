"""Engines that answer are timed while they read prompts as they do when they are served."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from export.engines import worker
from export.engines.openvino_genai import OpenVinoGenai
from export.engines.spec import EngineSpec, ReadsPrompts, last_tokens_of
from export.engines.torch import Torch
from foundation.core.decoding import Answer, Decoding
from tests.export.engines.test_openvino_genai import spec as genai
from tests.export.generation.genai_checkpoints import checkpoint, genai_folder

pytestmark = pytest.mark.whole

IDS = np.random.default_rng(0).integers(3, 90, (2, 9))


class Recorder:
    """Answers nothing, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], Decoding]] = []
        self.read_batches = 0

    def generate(self, prompts: Any, decoding: Decoding, on_tokens: Any = None) -> list[Answer]:
        self.asked.append(([prompt.tolist() for prompt in prompts], decoding))
        return []


def test_a_row_without_its_last_token_is_the_prompt_of_one_token() -> None:
    engine = Recorder()
    last_tokens_of(engine, {"input_ids": IDS})
    [(prompts, decoding)] = engine.asked
    assert prompts == IDS[:, :-1].tolist()
    assert (decoding.max_tokens, decoding.ignore_end, decoding.beams) == (1, True, 1)
    last_tokens_of(engine, {"input_ids": IDS[:, :1]})
    assert engine.asked[1][0] == IDS[:, :1].tolist()  # nothing is left of it otherwise


class Reader(Recorder):
    """Must not be asked for the logits of whole rows."""

    def read(self, features: Any) -> None:
        self.read_batches += 1


class Plain:
    """An engine that answers no prompts."""

    def __init__(self) -> None:
        self.predicted = 0

    def predict(self, features: Any) -> np.ndarray:
        self.predicted += 1
        return np.zeros((1, 2), np.float32)


def test_the_worker_times_reading_where_an_engine_reads_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in (Reader(), Plain()):
        monkeypatch.setattr(worker, "open_engine", lambda _, engine=engine: engine)
        assert worker.Worker(genai("gpt2"))._time({"input_ids": IDS}) >= 0
        assert (engine.read_batches if isinstance(engine, Reader) else engine.predicted) == 1


@pytest.mark.parametrize(("kind", "pipeline"), [("llama", "_paged_pipeline"), ("bloom", "_stateful_pipeline")])
def test_genai_reads_in_the_pipeline_that_is_served_and_compiles_nothing_else(kind: str, pipeline: str) -> None:
    engine = OpenVinoGenai(genai(kind))
    assert isinstance(engine, ReadsPrompts)
    engine.read({"input_ids": IDS})
    placement = engine.placement()
    assert (placement["device"], placement["float_precision"]) == ("cpu", "fp32")
    assert pipeline in vars(engine)
    assert "_compiled" not in vars(engine)
    assert engine.predict({"input_ids": IDS}).shape[:2] == IDS.shape
    assert engine.placement() == placement


@pytest.mark.parametrize(("kind", "floats"), [("llama", "fp32"), ("gpt2", "bf16")])
def test_torch_computes_the_logits_of_the_last_token_alone(kind: str, floats: str) -> None:
    engine = Torch(EngineSpec("torch", "eager", floats, floats, "cpu", 1, str(checkpoint(kind)), str(genai_folder(kind))))
    seen: list[torch.Size] = []
    engine._model.get_output_embeddings().register_forward_hook(lambda module, given, out: seen.append(out.shape))
    engine.read({"input_ids": IDS})
    engine.predict({"input_ids": IDS})
    assert [shape[1] for shape in seen] == [1, IDS.shape[1]]
