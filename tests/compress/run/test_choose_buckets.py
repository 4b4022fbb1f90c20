"""The step that chooses buckets, with a timer of the test's own: python -m pytest tests/compress/run/test_choose_buckets.py"""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from compress.recipe import check
from compress.run.choose_buckets import Buckets
from compress.run.state import RunState
from compress.run.steps import plan_steps
from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.stage.context import Context
from tests.tiny_recipes import tiny_vit
from tests.triton_repo import tiny_exports as tiny

STAGES: list[dict[str, Any]] = [{"finetune": {"epochs": 1}}, {"quantize": {}}, {"export": {}}]
ROWS = ["a fine film"] * 20 + ["dull " * 20] * 5
"""5 and 22 tokens."""


class Timer:
    """Time grows with the number of tokens."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def at(self, checkpoint, shapes, precision):
        self.asked.append((checkpoint, tuple(shapes), precision))
        return [float(batch * length) for batch, length in shapes]


def context(timer: Timer, tmp_path, **target: Any) -> Any:
    prepared = tiny.text_preprocessor(buckets=(40,))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    return SimpleNamespace(
        measure_latency=timer,
        checkpoints={"baseline": Artifact(tmp_path, {})},
        target=Target(batch_sizes=(1, 4), buckets="auto", **target),
        max_length=40,
        preprocessor=lambda path: prepared,
        data=SimpleNamespace(evaluation=SimpleNamespace(rows=ROWS)),
        progress=SimpleNamespace(log=lambda line: None),
    )


@pytest.mark.parametrize(("memory_mb", "expected"), [(1.0, [8, 24, 40]), (0.004, [8, 40]), (0.000001, [40])])
def test_the_buckets_fit_the_rows_and_the_memory(tmp_path, memory_mb, expected):
    timer = Timer()
    out = tmp_path / "out"
    out.mkdir()
    made = Buckets(quantized=True).run(Artifact(tmp_path, {}), context(timer, tmp_path, bucket_memory_mb=memory_mb), out)
    assert made == {"buckets": expected}
    assert timer.asked == [(tmp_path, ((4, 8), (4, 16), (4, 24), (4, 32), (4, 40)), "int8")]
    written = json.loads((out / "buckets.json").read_text())
    assert written["measured_ms"]["24"] == 24
    assert written["tokens"]["max"] == 22


def test_later_steps_pad_to_them():
    made: Any = SimpleNamespace(kind="buckets", metrics={"buckets": [8, 40]})
    given = Context("text-classification", None, 40, Target(buckets="auto"), 0, None, None)  # type: ignore[arg-type]
    state = RunState(given).after(Buckets(id="buckets", quantized=False), made, variant=False)
    target = state.context_for(Buckets(id="x", quantized=False)).target
    assert target == Target(buckets=(8, 40))
    assert target.lengths == (8, 40)
    assert Target(buckets="auto", sequence_lengths=(32,)).lengths == Target(sequence_lengths=(32,)).lengths == (32,)


def test_the_step_stands_before_the_export_where_it_is_asked_for():
    for buckets, expected in (("auto", ["evaluate-quantize", "buckets", "export"]), (None, ["evaluate-quantize", "export"])):
        steps = plan_steps(check({**tiny_vit("tiny"), "target": {"buckets": buckets}, "stages": STAGES}))
        ids = [str(step.id) for step in steps]
        assert ids[-len(expected) - 1 : -1] == expected
        assert all(step.quantized for step in steps if isinstance(step, Buckets))


def test_recipes_without_it_keep_their_keys():
    assert {"buckets", "bucket_memory_mb"}.isdisjoint(Target().model_dump(mode="json"))
    assert Target(buckets="auto").model_dump(mode="json")["buckets"] == "auto"
    assert Target.model_validate(Target(buckets=(8, 16)).model_dump(mode="json")).lengths == (8, 16)
