"""Stored answers: equal queries are asked once, by any run, and a stopped run goes on after its last batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from distill.labeller.answers import Answers
from distill.labeller.prompts import Query
from distill.labeller.scorer import Asked, Sampled
from tests.distill.labeller.tiny_labellers import SILENT


@dataclass
class Counting:
    """A scorer whose answers are lengths, two at a time; it fails at one prompt."""

    asked: list[str] = field(default_factory=list)
    fails_at: str = ""

    def scores(self, asked: Sequence[Asked]) -> Iterator[tuple[list[int], np.ndarray]]:
        for start in range(len(asked) - 2, -2, -2):  # not in order
            indices = list(range(max(0, start), start + 2))
            prompts = [str(asked[index].query.prompt) for index in indices]
            if self.fails_at in prompts and self.fails_at:
                raise KeyboardInterrupt
            self.asked += prompts
            words = [len(word) for word in asked[0].words]
            yield indices, np.array([[[-len(prompt)] * len(words), words] for prompt in prompts], np.float64)

    def texts(self, query: Query, count: int, sampled: Sampled) -> list[str | None]:
        self.asked.append(str(query.prompt))
        return [f"{query.prompt} {sampled.seed} {number}" if number else None for number in range(count)]


def store(folder: Path, scorer: Counting, model: str = "a") -> Answers:
    return Answers(folder, {"model": model}, lambda: scorer, SILENT)


def asked(*prompts: str, words: tuple[str, ...] = ("good", "bad")) -> list[Asked]:
    return [Asked(Query(prompt, " "), words) for prompt in prompts]


def test_only_new_queries_are_asked(tmp_path: Path) -> None:
    scorer = Counting()
    first, count = store(tmp_path, scorer).scores(asked("a", "bbb", "a", "cc"), "x")
    assert first.tolist() == [[[-n, -n], [4, 3]] for n in (1, 3, 1, 2)]
    assert (count, sorted(scorer.asked)) == (3, ["a", "bbb", "cc"])
    again, count = store(tmp_path, scorer).scores(asked("cc", "dddd", "a"), "x")
    assert again[:, 0, 0].tolist() == [-2, -4, -1]
    assert (count, scorer.asked[3:]) == (1, ["dddd"])


def test_stored_answers_need_no_model(tmp_path: Path) -> None:
    store(tmp_path, Counting()).scores(asked("a"), "x")
    unopened = Answers(tmp_path, {"model": "a"}, lambda: pytest.fail("the model is opened"), SILENT)
    assert unopened.scores(asked("a"), "x")[1] == 0


@pytest.mark.parametrize("change", ["model", "words", "gap"])
def test_answers_to_other_queries_are_no_answers(change: str, tmp_path: Path) -> None:
    scorer = Counting()
    store(tmp_path, scorer).scores(asked("a"), "x")
    other = asked("a", words=("good", "poor") if change == "words" else ("good", "bad"))
    other = [Asked(Query("a", ""), other[0].words)] if change == "gap" else other
    assert store(tmp_path, scorer, "b" if change == "model" else "a").scores(other, "x")[1] == 1


def test_a_stopped_run_keeps_what_was_answered(tmp_path: Path) -> None:
    scorer = Counting(fails_at="b")
    with pytest.raises(KeyboardInterrupt):
        store(tmp_path, scorer).scores(asked("a", "b", "c", "d"), "x")
    assert sorted(scorer.asked) == ["c", "d"]
    resumed = Counting()
    store(tmp_path, resumed).scores(asked("a", "b", "c", "d"), "x")
    assert sorted(resumed.asked) == ["a", "b"]


def test_runs_share_the_file(tmp_path: Path) -> None:
    prompts = [f"{number}" for number in range(60)]
    threads = [threading.Thread(target=lambda: store(tmp_path, Counting()).scores(asked(*prompts), "x")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = Counting()
    assert store(tmp_path, last).scores(asked(*prompts), "x")[1] == 0


def test_texts_are_drawn_once_for_each_number(tmp_path: Path) -> None:
    scorer, query, sampled = Counting(), Query("a", ""), Sampled(1.0, 0.9, 8, 0)
    first = store(tmp_path, scorer).texts(query, 3, sampled, 0)
    assert first == store(tmp_path, scorer).texts(query, 3, sampled, 0)
    assert first[0] is None
    assert first != store(tmp_path, scorer).texts(query, 3, sampled, 1)
    assert first != store(tmp_path, scorer).texts(query, 3, Sampled(1.0, 0.9, 8, 1), 0)
    assert len(scorer.asked) == 3
