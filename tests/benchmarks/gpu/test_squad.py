"""Rows as long as those of SQuAD, packed: their lengths, how they are put into batches, and rates with a clock wound by hand."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.squad import (
    LENGTHS,
    QUERIES,
    ROUNDS,
    SEQUENCES,
    TOKENS,
    Bert,
    Machine,
    batches_of,
    packed_rate,
    random_plan,
    squad_lengths,
)
from tests.export.fused.encoders import Again

pytestmark = pytest.mark.whole

TINY = Bert(width=32, inner=64, layers=1, heads=1, words=40, positions=16)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 50), st.integers(1, 6))
def test_batches_hold_every_row_once_and_end_where_the_next_has_no_room(lengths: list[int], tokens: int, sequences: int) -> None:
    found = batches_of(lengths, tokens, sequences)
    assert [row for batch in found for row in batch] == list(range(len(lengths)))
    for batch, following in zip(found, [*found[1:], None], strict=True):
        used = sum(lengths[row] for row in batch)
        assert used <= tokens
        assert len(batch) <= sequences
        assert following is None or len(batch) == sequences or used + lengths[following[0]] > tokens


def test_lengths_are_drawn_as_often_as_they_are_known() -> None:
    document = json.loads(LENGTHS.read_text())
    known = {int(length): count for length, count in document["lengths"].items()}
    assert sum(known.values()) == 1219
    assert max(known) == 384
    mean = sum(length * count for length, count in known.items()) / 1219
    found = squad_lengths(QUERIES)
    assert len(found) == 10_833
    assert set(found) <= set(known)
    assert sum(found) / len(found) == pytest.approx(mean, rel=0.01)
    assert found[:100] != sorted(found[:100])
    batches = batches_of(found)
    assert sum(found) / (TOKENS * len(batches)) > 0.98
    assert max(map(len, batches)) < SEQUENCES  # tokens end a batch, as a rule


@pytest.mark.slow
def test_the_lengths_are_those_of_the_questions_in_our_word_pieces() -> None:
    from tokenizers import Tokenizer

    root = Path(os.environ.get("COMPRESS_TEST_DATA", Path(__file__).resolve().parents[3].parent / "shared"))
    tokenizer = Tokenizer.from_file(str(root / "models" / "minilm-sst2" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(384, stride=128, strategy="only_second")
    with gzip.open(root / "data" / "squad" / "xquad.en.json.gz") as file:
        articles = json.load(file)["data"]
    found: Counter[int] = Counter()
    for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
        for question in paragraph["qas"]:
            encoding = tokenizer.encode(question["question"], paragraph["context"])
            found.update(len(part.ids) for part in (encoding, *encoding.overflowing))
    assert {str(length): count for length, count in sorted(found.items())} == json.loads(LENGTHS.read_text())["lengths"]


class Wound:
    """Seconds that pass with each recorded pass; counts what is waited for."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.waits, self.replays = 0.0, seconds, 0, 0

    def __call__(self) -> float:
        return self.now

    def wait(self) -> None:
        self.waits += 1

    def record(self, work: Callable[[], Any]) -> Any:
        recording, replay = Again(work), Again.replay

        class Replayed:
            def replay(_) -> Any:
                self.now += self.seconds
                self.replays += 1
                return replay(recording)

        return Replayed()


def played(lengths: Sequence[int] = (5, 9, 3, 12, 4, 7)) -> tuple[dict[str, Any], int, int]:
    clock = Wound(0.5)
    machine = Machine(torch.device("cpu"), clock.record, clock.wait, clock=clock)
    found = packed_rate(random_plan(TINY, "cpu"), lengths, machine, 20, 4)
    return found, clock.waits, clock.replays


@pytest.mark.slow
def test_a_rate_is_rows_by_the_seconds_of_a_round(interpreted: Callable[..., Any]) -> None:
    found, waits, replays = interpreted(played)
    assert found["batches"] == 3  # 5 + 9 + 3, 12 + 4, 7
    assert found["rounds"] == [4.0] * ROUNDS  # 6 rows in 3 batches of half a second
    assert found["sequences_per_s"] == 4.0
    assert found["filled"] == pytest.approx(40 / 60, abs=1e-4)
    assert found["mean_tokens"] == pytest.approx(40 / 6, abs=0.01)
    assert found["difference"] < 1e-4
    assert replays == 1 + 3 * ROUNDS  # the first is no part of a round
    assert waits == 2 * ROUNDS


def mixed_up() -> dict[str, Any]:
    import benchmarks.gpu.squad as squad

    original = squad.filled_alone
    squad.filled_alone = lambda ids, encoder: original(ids[::-1], encoder)
    try:
        return played((5, 4))[0]
    finally:
        squad.filled_alone = original


@pytest.mark.slow
def test_logits_that_differ_from_those_of_the_row_alone_are_told(interpreted: Callable[..., Any]) -> None:
    from benchmarks.gpu.kernel_verdicts import DIFFERENCE

    assert interpreted(mixed_up)["difference"] > DIFFERENCE


def test_a_plan_of_random_weights_is_bert_large() -> None:
    plan = random_plan(Bert(layers=1), "cpu")
    weights = [layer.weight.codes.numel() for layer in plan.blocks[0].linears]  # type: ignore[union-attr]
    assert sum(weights) == 4 * 1024**2 + 2 * 1024 * 4096
    assert (plan.longest, plan.blocks[0].heads, len(plan.word)) == (512, 16, 30522)
    assert Bert().layers == 24


def beside() -> tuple[list[dict[str, Any]], list[str], list[list[int]]]:
    from benchmarks.gpu import against_torch
    from tests.benchmarks.gpu.test_timing import Queue

    queue, clock, given = Queue(), Wound(0.0), []

    class Recording:
        replay = staticmethod(queue.work("ours", 0.5))

    def record(work: Callable[[], Any]) -> Any:
        given.append(list(work().shape))  # the pass runs on the rows of that shape
        return Recording

    model = against_torch.eager_bert(TINY, "cpu", torch.float32)
    assert sum(weight.numel() for weight in model.bert.encoder.parameters()) > 4 * 32**2
    with pytest.MonkeyPatch.context() as patch:
        forward = against_torch._eager

        def eager(*arguments: Any) -> Callable[[], Any]:
            logits = forward(*arguments)()
            given.append(list(logits.shape))
            return queue.work("eager", 6.0)

        patch.setattr(against_torch, "_eager", eager)
        machine = Machine(torch.device("cpu"), record, clock.wait, dtype=torch.float32)
        rows = against_torch.compare_with_torch(random_plan(TINY, "cpu"), TINY, machine, queue, [(1, 4), (2, 6)])
    return rows, queue.order, given


@pytest.mark.slow
def test_our_kernels_and_torch_take_turns_on_the_same_rows(interpreted: Callable[..., Any]) -> None:
    rows, order, given = interpreted(beside)
    assert rows[0] == {"batch": 1, "sequence": 4, "ours_ms": 0.5, "eager_ms": 6.0, "speedup": 12.0}
    assert (rows[1]["batch"], rows[1]["sequence"]) == (2, 6)
    assert given == [[1, 2], [1, 2], [2, 2], [2, 2]]
    changes = [name for at, name in enumerate(order) if at == 0 or order[at - 1] != name]
    assert changes == ["ours", "eager"] * 6


def states_of_deep() -> tuple[float, bool]:
    from benchmarks.gpu.squad import packed
    from export.fused.forward import Encoder

    encoder = Encoder(random_plan(Bert(64, 128, 6, 2, 40, 16), "cpu"), torch.device("cpu"), torch.float16)
    states = encoder.pooled(packed([torch.arange(9).numpy(), torch.arange(12).numpy()], encoder))
    return float(states.std()), bool(states.isfinite().all())


@pytest.mark.slow
def test_its_numbers_stay_in_range_through_the_layers(interpreted: Callable[..., Any]) -> None:
    spread, finite = interpreted(states_of_deep)
    assert finite
    assert 0.5 < spread < 2
