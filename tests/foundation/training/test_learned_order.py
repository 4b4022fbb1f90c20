"""Training on the candidates of queries: each loss learns, a batch can be divided as one likes, and what cannot be is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.reading.load import load_data
from distill.distill import Distill
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.data.config import DataConfig
from foundation.data.splits import Split
from foundation.labels import candidates
from foundation.labels.value import Numbers
from foundation.machine.parallel import Team
from foundation.models.checkpoint import load
from foundation.stage.context import Context
from foundation.training.choices import OrderLoss
from foundation.training.finetune import Finetune
from foundation.training.losses.table import loss_names
from foundation.training.processes.dealing import Dealing
from foundation.training.rows import Rows
from foundation.training.supervised import supervised
from foundation.training.train import Batch
from tests import tiny_collection
from tests.export import sentiment
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

TASK = "reranking"
LOSSES = loss_names(TASK)


@dataclass
class Fellow:
    """One of several processes, as far as dealing out rows goes."""

    data_rank: int
    data_size: int

    share = Team.share


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_collection.cross_encoder(tmp_path_factory.mktemp("model") / "source")


@pytest.fixture
def context(told: Any, tmp_path: Path) -> Context:
    folder = tiny_collection.folder(tmp_path / "data", train=6, dev=4, test=4, documents=30)
    data = load_data(DataConfig(path=str(folder)), TASK, None, lambda line: None)
    return Context(TASK, data, sentiment.LENGTH, Target(sequence_lengths=(8,)), 0, told, tmp_path / "scratch")


def told_by_a_word(num_queries: int, seed: int) -> Split:
    """Lists of two to five documents in any order, of which those with the word 'great' are relevant to their query."""
    draw, rows, numbers, grades = np.random.default_rng(seed), [], [], []
    for number in range(num_queries):
        size = int(draw.integers(2, 6))
        for place, right in enumerate(draw.permutation([True, *[False] * (size - 1)])):
            text = " ".join([*draw.choice(sentiment.WORDS, 3), "great" if right else "poor"])
            rows.append((f"film {sentiment.WORDS[number % 5]}", f"{text} {sentiment.WORDS[place]}"))
            numbers.append(number)
            grades.append(2 * int(right))
    return Split(list(rows), candidates.labels_of(numbers, grades, [[2]] * num_queries))


@pytest.mark.first(1)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_learns_to_tell_what_is_relevant(name: OrderLoss, model: Path, context: Context, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    data = replace(context.data, train=told_by_a_word(40, 0), selection=told_by_a_word(12, 1))
    stage = Finetune(epochs=12, learning_rate=1e-2, batch_size=20, evaluate_every=64, loss=name)
    figures = stage.run(Artifact(model, {}), replace(context, data=data), tmp_path / "out")
    assert set(figures["losses"][0]) == {"epoch", "loss", name}
    assert figures["losses"][-1]["loss"] < 0.4 * figures["losses"][0]["loss"]
    assert figures["selection"]["values"][-1]["value"] > 0.9  # of queries that were not seen


def test_the_first_loss_is_that_of_a_model_that_tells_nothing_apart(model: Path, context: Context, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    figures = Finetune(epochs=1, learning_rate=1e-9, batch_size=28, keep="last").run(Artifact(model, {}), context, tmp_path / "out")
    assert figures["losses"][0]["listwise"] == pytest.approx(math.log(7), abs=0.1)  # lists of seven: of eight candidates two are relevant


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_and_processes_add_up_to_the_whole_batch(name: OrderLoss, model: Path, context: Context) -> None:
    loaded, train = load(model).eval(), context.data.train.take([*range(17), *range(21, 33)])  # lists of 7, 7, 3, 7 and 5
    rows, labels = Rows.prepare(train.rows, context.preprocessor(model)), torch.from_numpy(train.labels.array)
    assert train.runs.tolist() == [7, 7, 3, 7, 5]
    objective, everything = supervised(TASK, loss=name), np.arange(len(train))

    def gradient(parts: Sequence[NDArray[np.int64]]) -> list[Tensor]:
        loaded.zero_grad()
        for part in parts:
            terms = objective(loaded, Batch(rows.batch(part), labels[torch.from_numpy(part)], part, 0, 1))
            (terms[name].sum() / len(train)).backward()  # type: ignore[no-untyped-call]
        return [cast("Tensor", parameter.grad).clone() for parameter in loaded.parameters()]

    whole = gradient([everything])
    assert any(float(one.abs().max()) > 1e-4 for one in whole)
    for processes, micro in ((1, 8), (1, 15), (2, None), (3, 7)):
        fellows = [Dealing(train.runs, 40, micro, cast("Team", Fellow(rank, processes))) for rank in range(processes)]
        parts = [part for fellow in fellows for part in fellow.parts(everything) if len(part)]
        assert len(parts) > 1
        for found, expected in zip(gradient(parts), whole, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_a_list_that_was_cut_would_not_add_up(model: Path, context: Context) -> None:
    """What the test above would see if micro-batches parted a list."""
    loaded, train = load(model).eval(), context.data.train.take(range(7))
    rows, labels, objective = Rows.prepare(train.rows, context.preprocessor(model)), torch.from_numpy(train.labels.array), supervised(TASK)
    sums = []
    for parts in ([range(7)], [range(4), range(4, 7)]):
        batches = [Batch(rows.batch(np.array(part)), labels[list(part)], np.array(part), 0, 1) for part in parts]
        sums.append(sum(float(objective(loaded, batch)["listwise"].detach().sum()) for batch in batches))
    assert abs(sums[0] - sums[1]) > 1


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"batch_size": 6}, r"finetune\.batch_size: 6 given; the 7 candidates of a query are rows of one batch: give at least 7"),
        (
            {"micro_batch_size": 4},
            r"finetune\.micro_batch_size: 4 given; the 7 candidates of a query are rows of one batch: give at least 7",
        ),
        (
            {"loss": "ranking"},
            r"finetune\.loss: ranking given; it is for sentence-embedding, .*: give listwise, ranknet, lambdarank or pointwise",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(given: dict[str, Any], line: str, model: Path, context: Context) -> None:
    with pytest.raises(InputError, match=line) as caught:
        Finetune(**given).check(load(model).config, None, context)
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize(
    ("task", "remedy"), [("text-regression", "leave it out"), ("retrieval", "give cosine, ranking, triplet or margin_mse")]
)
def test_other_tasks_refuse_losses_of_candidates(task: str, remedy: str, model: Path, context: Context) -> None:
    other = replace(context, task=task, data=replace(context.data, train=Split(["a", "b"], Numbers(np.array([0.1, 0.2], np.float32)))))
    with raises_problem("finetune.loss", "listwise", "reranking", remedy):
        Finetune(loss="listwise").check(load(model).config, None, other)


def test_distillation_refuses_what_would_part_a_list(model: Path, context: Context) -> None:
    config = load(model).config
    for given in ({"fraction": 0.5}, {"augment": {}}, {"extra_text": {"path": "more.txt", "text": "a", "text_pair": "b"}}):
        (key,) = given
        with raises_problem(f"distill.{key}", "given", "reranking"):
            Distill(student={"layers": 1}, **given).check(config, config, context)
