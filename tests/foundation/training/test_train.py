from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.core.shown import shown
from foundation.core.target import Parallel, Target
from foundation.data.splits import Split
from foundation.labels.classes import ClassIds
from foundation.machine.parallel import Team
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.training.finite import blamed
from foundation.training.history import History
from foundation.training.optimizers import parameter_groups
from foundation.training.rows import Rows, plan_epoch
from foundation.training.schedule import learning_rate, steps_in
from foundation.training.supervised import supervised
from foundation.training.train import Batch, TrainConfig, Training, train
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

TARGET = Target(sequence_lengths=(8,))


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"epochs": 3, "learning_rate": 1e-3, "batch_size": 4, "checkpoint_seconds": 1e9, **changes})


@pytest.fixture(scope="module")
def sentences(words: list[str]) -> tuple[list[str], ClassIds]:
    """22 rows: positive where they hold 'good'."""
    draw = random.Random(0)
    rows = [" ".join(draw.choices(words, k=draw.randint(1, 14))) for _ in range(22)]
    rows = [row if i % 2 else f"{row} good" for i, row in enumerate(rows)]
    return rows, ClassIds(np.array(["good" in row.split() for row in rows], np.int64))


class Killed(Exception):
    pass


class Dies:
    """An objective that stands for a kill: it raises in one step."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.objective = supervised("text-classification")

    def __call__(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        if batch.step == self.at:
            raise Killed
        return self.objective(model, batch)


def run(folder: Path, sentences: Any, told: Any, scratch: Path, objective: Any = None, **changes: Any) -> tuple[nn.Module, Any]:
    model = load(folder)
    prepared = Checkpoint(folder).preprocessor("text-classification", 32, TARGET)
    select = changes.pop("select", None)
    seed, profiles = changes.pop("seed", 0), changes.pop("profiles", None)
    parallel = Parallel(checkpointing=changes.pop("checkpointing", "none"))
    training = Training(Split(*sentences), prepared, config(**changes), seed, scratch, told, select, profiles=profiles, parallel=parallel)
    history = train(model, objective or supervised("text-classification"), training)
    return model, history


def learns_and_continues(folder: Path, sentences: Any, told: Any, scratch: Path, **changes: Any) -> None:
    """A training learns, and one that was killed after step 7 goes on to equal bits."""
    whole, history = run(folder, sentences, told, scratch / "whole", **changes)
    assert history.losses[-1]["loss"] < 0.9 * history.losses[0]["loss"]
    with pytest.raises(Killed):
        run(folder, sentences, told, scratch / "killed", Dies(7), checkpoint_seconds=0, **changes)
    resumed, _ = run(folder, sentences, told, scratch / "killed", **changes)
    assert "resumed after step 7" in "".join(told.lines)
    assert_equal(whole, resumed)


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for name, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[name]), name


def peak(model: nn.Module) -> float:
    """A value on the selection split that goes up and down, but depends on the weights alone."""
    return math.sin(1e4 * float(model.classifier.weight.detach().sum()))  # type: ignore[union-attr,operator]


def test_it_learns(tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    model, history = run(tiny_bert, sentences, told, tmp_path, epochs=30, learning_rate=3e-3)
    assert history.losses[-1]["loss"] < 0.1 < history.losses[0]["loss"]
    assert history.steps == told.advanced == 30 * 6
    assert not model.training


@pytest.mark.parametrize("at", [3, *(pytest.param(at, marks=pytest.mark.slow) for at in (6, 13))])
def test_a_killed_run_continues_to_equal_bits(at: int, tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    whole, expected = run(tiny_bert, sentences, told, tmp_path / "whole", select=peak, evaluate_every=2)
    assert expected.best_step is not None
    assert expected.best_step < 13  # before the last kill, so that the best weights have to be saved too
    assert load(tiny_bert).config.hidden_dropout_prob > 0  # type: ignore[union-attr,operator]
    with pytest.raises(Killed):
        run(tiny_bert, sentences, told, tmp_path / "killed", Dies(at), select=peak, evaluate_every=2, checkpoint_seconds=0)
    torch.manual_seed(99)  # a new process has other generators
    resumed, history = run(tiny_bert, sentences, told, tmp_path / "killed", select=peak, evaluate_every=2)
    assert f"resumed after step {at} of 18" in "".join(told.lines)
    assert_equal(whole, resumed)
    assert (history.losses, history.selection, history.best_step) == (expected.losses, expected.selection, expected.best_step)


def test_a_profile_changes_no_bit_and_counts_tokens(tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    plain, _ = run(tiny_bert, sentences, told, tmp_path / "a")
    profiled, _ = run(tiny_bert, sentences, told, tmp_path / "b", profiles=tmp_path / "profiles")
    assert_equal(plain, profiled)
    assert sorted(file.name for file in (tmp_path / "profiles").iterdir()) == ["train.json", "train.trace.json.gz"]
    found = json.loads((tmp_path / "profiles" / "train.json").read_text())
    lengths = Rows.prepare(sentences[0], Checkpoint(tiny_bert).preprocessor("text-classification", 32, TARGET)).lengths
    assert found["timed_steps"] + found["traced_steps"] == 13  # of 18, the first 3 and the last 2 are let be
    mean = float(lengths.mean())
    assert 0.7 * mean < found["tokens_per_s"] / found["rows_per_s"] < 1.3 * mean
    assert found["utilisation"] > 0


def test_another_seed_gives_other_weights(tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    """Equal bits after a resumption mean something only where the generators matter."""
    first, _ = run(tiny_bert, sentences, told, tmp_path / "a", seed=0, epochs=1)
    second, _ = run(tiny_bert, sentences, told, tmp_path / "b", seed=1, epochs=1)
    assert not torch.equal(first.classifier.weight, second.classifier.weight)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("file", ["state.json", "tensors.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_checkpoint_is_not_used(file: str, damage: str, tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tiny_bert, sentences, told, tmp_path, Dies(3), epochs=1, checkpoint_seconds=0)
    path = tmp_path / "training" / file
    contents = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(contents[: len(contents) // 2] if damage == "cut" else contents[:-9] + b"\xff" + contents[-8:])
    resumed, _ = run(tiny_bert, sentences, told, tmp_path, epochs=1)
    assert len(told.warnings) == 1
    assert "damaged" in told.warnings[0]
    whole, _ = run(tiny_bert, sentences, told, tmp_path / "other", epochs=1)
    assert_equal(whole, resumed)


def test_activations_in_8_bits_learn_and_continue(tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    learns_and_continues(tiny_bert, sentences, told, tmp_path, checkpointing="int8", epochs=12, learning_rate=3e-3)
    whole, _ = run(tiny_bert, sentences, told, tmp_path / "float")
    rounded, _ = run(tiny_bert, sentences, told, tmp_path / "rounded", checkpointing="int8")
    assert any(not torch.equal(value, rounded.state_dict()[name]) for name, value in whole.state_dict().items())


@pytest.mark.parametrize("changes", [{"learning_rate": 2e-3}, {"seed": 5}, {"checkpointing": "int8"}])
def test_a_checkpoint_of_other_settings_is_not_used(changes: Any, tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tiny_bert, sentences, told, tmp_path, Dies(3), epochs=1, checkpoint_seconds=0)
    run(tiny_bert, sentences, told, tmp_path, epochs=1, **changes)
    assert "other settings" in told.warnings[0]


def test_a_checkpoint_holds_no_pickle(tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    run(tiny_bert, sentences, told, tmp_path, epochs=1, checkpoint_seconds=0, select=peak)
    assert sorted(path.name for path in (tmp_path / "training").iterdir()) == ["state.json", "tensors.safetensors"]
    assert json.loads((tmp_path / "training" / "state.json").read_text())["values"]["history"]["steps"] == 6


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 rounds more than the tests that compare sums of different order allow."""
    monkeypatch.setattr("foundation.training.train.autocast_dtype", lambda device: torch.float32)


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("micro", [1, 3, 4])
def test_the_split_of_a_batch_changes_nothing(micro: int, tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    def without_dropout(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        return supervised("text-classification")(model.eval(), batch)

    whole, one = run(tiny_bert, sentences, told, tmp_path / "a", without_dropout, epochs=1)
    split, other = run(tiny_bert, sentences, told, tmp_path / "b", without_dropout, epochs=1, micro_batch_size=micro)
    assert one.losses[0]["loss"] == pytest.approx(other.losses[0]["loss"], abs=1e-5)
    for name, value in whole.state_dict().items():  # AdamW divides by tiny second moments: rounding is seen in a few weights
        assert (value - split.state_dict()[name]).abs().mean() < 1e-5, name


@pytest.mark.usefixtures("in_float32")
def test_one_step_is_adamw_on_the_mean_of_the_rows(tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    rows, labels = sentences[0][:4], sentences[1][:4]

    def without_dropout(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        return supervised("text-classification")(model.eval(), batch)

    trained, _ = run(tiny_bert, (rows, labels), told, tmp_path, without_dropout, epochs=1, warmup=0.0, weight_decay=0.1)
    model = load(tiny_bert)
    prepared = Checkpoint(tiny_bert).preprocessor("text-classification", 32, TARGET)
    features = {name: torch.from_numpy(value) for name, value in prepared.encode(rows, 24).items()}
    nn.functional.cross_entropy(model(**features).logits, torch.from_numpy(labels.array)).backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None))
    for (name, weight), result in zip(model.named_parameters(), trained.parameters(), strict=True):
        assert weight.grad is not None
        gradient = weight.grad * min(1.0, 1.0 / (norm + 1e-6))
        decayed = weight.detach() * (1 - 1e-3 * (0.1 if weight.ndim > 1 else 0.0))
        expected = decayed - 1e-3 * gradient / (gradient.abs() + 1e-8)  # the first step of Adam: m / sqrt(v) = g / |g|
        close = (result - expected).abs() < 2e-6
        assert close.float().mean() > 0.98, name  # where g is about 1e-8, rounding decides


def test_the_best_weights_are_kept(tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    best, history = run(tiny_bert, sentences, told, tmp_path / "a", select=peak, evaluate_every=2)
    last, _ = run(tiny_bert, sentences, told, tmp_path / "b", select=peak, evaluate_every=2, keep="last")
    assert [entry["step"] for entry in history.selection] == list(range(2, 19, 2))
    assert history.best_step != history.steps
    assert peak(best) == history.best == max(entry["value"] for entry in history.selection)
    assert peak(last) == history.selection[-1]["value"]


def test_an_objective_with_weights_is_trained_and_resumed(tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self, dies: int | None = None) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.dies = dies

        def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            if batch.step == self.dies:
                raise Killed
            return {"part": supervised("text-classification")(model, batch)["cross_entropy"] * self.scale.abs()}

    whole = Scaled()
    run(tiny_bert, sentences, told, tmp_path / "a", whole, epochs=1)
    with pytest.raises(Killed):
        run(tiny_bert, sentences, told, tmp_path / "b", Scaled(4), epochs=1, checkpoint_seconds=0)
    resumed = Scaled()
    run(tiny_bert, sentences, told, tmp_path / "b", resumed, epochs=1)
    assert whole.scale.item() != 1.0
    assert torch.equal(whole.scale, resumed.scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_says_what_to_do(value: float, tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    def broken(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        return {"part": supervised("text-classification")(model, batch)["cross_entropy"] * (value if batch.step == 2 else 1.0)}

    with raises_problem("train", "part", "in step 3 of 18", "lower learning_rate (0.001 given)"):
        run(tiny_bert, sentences, told, tmp_path, broken)


def test_a_gradient_that_is_no_number_says_what_to_do(tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    def broken(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        loss = supervised("text-classification")(model, batch)["cross_entropy"]
        return {"part": loss + 0.0 * torch.sqrt(loss * 0.0)}  # a finite value whose derivative is 0 * inf

    with pytest.raises(InputError, match="the gradient became nan in step 1"):
        run(tiny_bert, sentences, told, tmp_path, broken)


def broken_in(dtype: torch.dtype, value: float, steps: Any, inside: bool = False) -> Any:
    """Returns an objective whose loss, or gradient, is no number in some steps, as long as it is computed in a dtype."""

    def broken(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        loss = supervised("text-classification")(model, batch)["cross_entropy"]
        half = torch.is_autocast_enabled("cpu")
        if batch.step in steps and half == (dtype == torch.bfloat16):
            loss = loss + 0.0 * torch.sqrt(loss * 0.0) if inside else loss * value
        return {"part": loss}

    return broken


@pytest.mark.parametrize("inside", [False, True])
def test_a_step_that_is_no_number_in_bfloat16_is_taken_again_in_float32(
    inside: bool, tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foundation.training.train.autocast_dtype", lambda device: torch.bfloat16)
    told.warnings.clear()
    model, history = run(tiny_bert, sentences, told, tmp_path, broken_in(torch.bfloat16, math.nan, (2, 5), inside))
    assert (history.steps, history.repeated) == (18, 2)
    assert all(math.isfinite(value) for epoch in history.losses for value in epoch.values())
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
    what = "gradient became nan" if inside else "loss (part) became nan"
    assert told.warnings == [f"train: the {what} in bfloat16 in step {step}; the step is taken again in float32" for step in (3, 6)]


def test_processes_train_in_the_format_of_the_first_one(
    tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foundation.training.train.autocast_dtype", lambda device: torch.float32)
    monkeypatch.setattr(Team, "broadcast_object", lambda self, value: torch.bfloat16 if value == torch.float32 else value)
    _, history = run(tiny_bert, sentences, told, tmp_path, epochs=1)
    assert history.autocast == "bfloat16"


def test_after_some_of_them_it_goes_on_in_float32(
    tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foundation.training.train.autocast_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr("foundation.training.train.MOST_REPEATED", 3)
    _, history = run(tiny_bert, sentences, told, tmp_path, broken_in(torch.bfloat16, math.inf, range(1, 18)))
    assert (history.steps, history.repeated) == (18, 3)


def test_a_row_that_alone_gives_no_number_is_named(tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    rows, _ = sentences
    guilty = rows.index(next(row for row in rows if "good" in row.split()))

    def broken(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        loss = supervised("text-classification")(model, batch)["cross_entropy"]
        return {"part": loss * torch.where(torch.from_numpy(batch.indices == guilty), math.nan, 1.0)}

    with pytest.raises(InputError, match=r"loss \(part\) became nan in step") as caught:
        run(tiny_bert, sentences, told, tmp_path, broken)
    assert f": the row {shown(rows[guilty])} alone gives it; leave it out of the data, or lower learning_rate" in str(caught.value)
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ((), ""),
        ((0, 1, 2), ""),
        ((1,), ": the row 'b' alone gives it; leave it out of the data, or"),
        ((2,), ": the row a file of 3 bytes alone gives it; leave it out of the data, or"),
        ((0, 2), ": the row 'a' alone gives it, and 1 more of its 3 rows do; leave it out of the data, or"),
    ],
)
def test_rows_are_blamed_where_others_are_well(bad: tuple[int, ...], said: str) -> None:
    def alone(part: np.ndarray) -> Any:
        return {"part": math.inf if int(part[0]) in bad else 1.0}, 1.0

    assert blamed(np.arange(3), ["a", "b", b"123"], alone) == said


def test_no_rows_are_an_error(tiny_bert: Path, told: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rows to train on"):
        run(tiny_bert, ([], np.zeros(0, np.int64)), told, tmp_path)


def test_the_generators_outside_are_untouched(tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    run(tiny_bert, sentences, told, tmp_path, epochs=1)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()  # type: ignore[index]


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 3), st.integers(1, 5))
def test_an_epoch_holds_every_row_once(num_rows: int, batch_size: int, epoch: int, window: int) -> None:
    lengths = np.random.default_rng(num_rows).integers(1, 64, num_rows)
    batches = plan_epoch(lengths, batch_size, 7, epoch, window)
    assert sorted(np.concatenate(batches).tolist()) == list(range(num_rows))
    assert len(batches) == -(-num_rows // batch_size)
    assert sum(len(batch) != batch_size for batch in batches) <= 1


def test_epochs_differ_and_batches_are_of_like_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 128, 4000)
    first, second = plan_epoch(lengths, 16, 0, 0), plan_epoch(lengths, 16, 0, 1)
    assert not np.array_equal(first[0], second[0])
    spread = np.mean([np.ptp(lengths[batch]) for batch in first])
    assert spread < 8  # 120 in batches of random rows
    assert abs(np.corrcoef(np.arange(len(first)), [lengths[batch].mean() for batch in first])[0, 1]) < 0.2


def test_text_batches_equal_the_padded_encoding(tiny_bert: Path, sentences: Any) -> None:
    prepared = Checkpoint(tiny_bert).preprocessor("text-classification", 12, TARGET)
    rows = Rows.prepare(sentences[0], prepared)
    for indices in (np.array([3]), np.array([5, 0, 9, 3]), np.arange(22)):
        batch = rows.batch(indices)
        width = batch["input_ids"].shape[1]
        assert width % 8 == 0 or width == 12
        expected = prepared.encode([sentences[0][i] for i in indices], width)
        assert set(batch) == set(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(batch[name].numpy(), value)


def test_images_are_equal_from_memory_and_anew(tiny_vit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from PIL import Image

    def png(seed: int) -> bytes:
        stream = io.BytesIO()
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8), np.uint8)).save(stream, "PNG")
        return stream.getvalue()

    prepared = Checkpoint(tiny_vit).preprocessor("image-classification", 0, TARGET)
    images = [png(seed) for seed in range(5)]
    kept = Rows.prepare(images, prepared)
    monkeypatch.setattr("foundation.training.rows.IMAGE_CACHE_BYTES", 10)
    anew = Rows.prepare(images, prepared)
    assert kept.pixels is not None
    assert anew.pixels is None
    indices = np.array([4, 1])
    assert torch.equal(kept.batch(indices)["pixel_values"], anew.batch(indices)["pixel_values"])


@pytest.mark.parametrize(("factor", "num_steps", "expected"), [(1.1, 50, 55), (0.07, 100, 7), (0.5, 3, 2), (3, 50, 150), (1e-3, 50, 1)])
def test_steps_are_rounded_up_but_not_for_the_last_bit(factor: float, num_steps: int, expected: int) -> None:
    """In floats 1.1 times 50 is 55.00000000000001."""
    assert steps_in(factor, num_steps) == expected


def test_epochs_and_warmup_are_counted_so(tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path) -> None:
    rows, labels = [sentences[0][0]] * 50, ClassIds(np.zeros(50, np.int64))
    assert run(tiny_bert, (rows, labels), told, tmp_path, epochs=1.1, batch_size=1)[1].steps == 55
    assert learning_rate(6, 100, 1.0, 0.07, "linear") == 1.0


class Waits:
    """Stands for a loop of several processes: it takes no step."""

    autocast = torch.float32

    def __init__(self, *arguments: Any) -> None:
        self.history = History()

    def resume(self, state: Any, progress: Any, seed: int) -> None:
        assert state is None

    def run(self, write: Any, progress: Any, profiles: Any) -> None: ...

    def finish(self) -> History:
        return self.history


def test_a_checkpoint_is_for_any_number_of_processes(
    tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr("foundation.training.train.read_state", lambda scratch, settings, warn: found.append(settings))
    monkeypatch.setattr("foundation.training.train._Loop", Waits)
    monkeypatch.setattr(Team, "align", lambda self, trained: None)
    prepared = Checkpoint(tiny_bert).preprocessor("text-classification", 32, TARGET)
    for team in (Team(), Team(0, 2, "ddp"), Team(0, 2, "fsdp2")):
        objective, split = supervised("text-classification"), Split(*sentences)
        train(load(tiny_bert), objective, Training(split, prepared, config(), 0, tmp_path, told, team=team))
    assert found[0] == found[1] == found[2]


def test_a_training_that_goes_on_elsewhere_says_that_bits_may_differ(
    tiny_bert: Path, sentences: Any, told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Killed):
        run(tiny_bert, sentences, told, tmp_path, Dies(3), epochs=1, checkpoint_seconds=0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    _, history = run(tiny_bert, sentences, told, tmp_path, epochs=1)
    assert "resumed after step 3 of 6, begun by one process of 1 thread: the same up to rounding" in "".join(told.lines)
    assert history.steps == 6


def test_the_schedule_rises_and_falls() -> None:
    linear = [learning_rate(step, 20, 1.0, 0.2, "linear") for step in range(20)]
    assert linear[:4] == [0.25, 0.5, 0.75, 1.0]
    np.testing.assert_allclose(np.diff(linear[4:]), -1 / 16)
    assert learning_rate(12, 20, 2.0, 0.2, "cosine") == pytest.approx(1.0)
    assert learning_rate(19, 20, 2.0, 0.2, "constant") == 2.0
    assert learning_rate(0, 1, 2.0, 0.0, "linear") == 2.0


def test_biases_and_norms_have_no_decay(tiny_bert: Path) -> None:
    model = load(tiny_bert)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, free = ([names[id(p)] for p in group["params"]] for group in parameter_groups(model, 0.1))
    assert all(name.endswith("weight") and "LayerNorm" not in name for name in decayed)
    assert all(name.endswith("bias") or "LayerNorm" in name for name in free)
    assert len(decayed) + len(free) == len(names)


def test_many_quick_epochs_are_few_lines_of_the_console(
    tiny_bert: Path, sentences: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = 0.0

    def objective(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        nonlocal seconds
        seconds += 0.25  # an epoch of 6 steps lasts 1.5 s
        return supervised("text-classification")(model, batch)

    progress = ConsoleProgress(file=tmp_path / "log.txt", clock=lambda: seconds)
    run(tiny_bert, sentences, progress, tmp_path / "scratch", objective, epochs=20)
    shown = [int(line.split("epoch ")[1].split(",")[0]) for line in capsys.readouterr().err.splitlines()]
    assert shown == [1, 7, 14, 20]  # 20 epochs in 30 s: the first, one every 10 s, the last
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 20
