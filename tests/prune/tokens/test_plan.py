"""What `compress plan` says of tokens that leave: which shares stay, where that changes, and the products that are left, by the formula."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from compress.commands.plan import describe
from compress.forecast import predicted
from compress.run.prepare import prepare
from foundation.core.progress import ConsoleProgress
from foundation.models.folder import Checkpoint
from tests.export import sentiment
from tests.prune import small_runs

pytestmark = pytest.mark.whole

LENGTH = 16
ALONE: dict[str, Any] = {"sparsity": 0, "rows": 16, "recover": None}
STAGES: list[dict[str, Any]] = [
    {"prune": {**ALONE, "id": "some", "tokens": [0.5]}},
    {"prune": {**ALONE, "id": "same", "granularity": ["ffn"], "sparsity": 0.3, "multiple_of": 8}},
    {"prune": {**ALONE, "id": "fewer", "tokens": [0.1234]}},
    {"prune": {**ALONE, "id": "other", "input": "baseline", "tokens": 0.25}},
    {"quantize": {"calibration": {"rows": 8}}},
]


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    return small_runs.recipe(tmp_path, "tokens", sentiment.rows(40), ["openvino"], STAGES)


@pytest.mark.slow
def test_the_plan_shows_where_tokens_leave(recipe: Any, tmp_path: Path) -> None:
    told = {line.split()[0]: line for line in describe(recipe, tmp_path / "run").splitlines()[3:]}
    depth = Checkpoint(sentiment.checkpoint(), "test").config.num_hidden_layers
    assert depth == 2, "the shares below are those of two layers"
    remain = "of a row's tokens remain"
    assert f" 50 % {remain}" in told["some"]
    assert f" 12.3 % {remain}" in told["fewer"]
    assert f" 25 % {remain}" in told["other"]
    assert all(remain not in told[name] for name in ("baseline", "same", "quantize"))


def test_the_predicted_products_are_those_of_the_tokens_that_are_left(recipe: Any, tmp_path: Path) -> None:
    planned = {entry.step.id: entry for entry in predicted(recipe, prepare(recipe, tmp_path / "run", ConsoleProgress("quiet")))}
    config = Checkpoint(sentiment.checkpoint(), "test").config
    wide, neurons = config.hidden_size, config.intermediate_size

    def macs(share: float) -> int:
        """Of two blocks: the second one sees the tokens that the first one leaves."""
        blocks = 0
        for tokens in (LENGTH, math.ceil(share * LENGTH)):
            blocks += tokens * (4 * wide * wide + 2 * wide * neurons) + 2 * tokens * tokens * wide
        return blocks + wide * wide + wide * 2

    for name, share in (("baseline", 1.0), ("some", 0.5), ("other", 0.25)):
        assert planned[name].size is not None
        assert planned[name].size.macs == macs(share), name
        assert planned[name].size.parameters == planned["baseline"].size.parameters
