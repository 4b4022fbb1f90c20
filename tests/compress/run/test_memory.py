"""The memory that a step is predicted to take."""

from __future__ import annotations

from typing import cast

from transformers import BertConfig

from compress.run.implicit import Evaluate
from compress.run.memory import memory_of
from foundation.models.size import Counts
from foundation.stage.context import Context
from foundation.training.finetune import Finetune

CONFIG = BertConfig(hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4)
WEIGHTS = 2 * (4 * 64**2 + 2 * 64 * 128)
LIBRARIES = 700_000_000


def predicted(step: Evaluate | Finetune, tokens: int, attention_macs: int) -> int:
    size = Counts(parameters=WEIGHTS, macs=tokens * WEIGHTS + attention_macs, attention_macs=attention_macs)
    return memory_of(step, size, size, CONFIG, 0, cast("Context", None))


def test_activations_grow_with_the_tokens_and_not_with_their_pairs() -> None:
    for step in (Evaluate(id="evaluate"), Finetune(batch_size=4)):
        short, long = (predicted(step, tokens, 0) - predicted(step, 1, 0) for tokens in (129, 1025))
        assert long == 8 * short
        assert predicted(step, 1024, attention_macs=2 * 2 * 64 * 1024**2) == predicted(step, 1024, 0)


def test_a_training_keeps_the_activations_of_all_layers() -> None:
    evaluated = predicted(Evaluate(id="evaluate"), 1024, 0) - LIBRARIES - 4 * WEIGHTS
    trained = predicted(Finetune(batch_size=32), 1024, 0) - LIBRARIES - 4 * 5 * WEIGHTS
    assert trained == CONFIG.num_hidden_layers * evaluated
