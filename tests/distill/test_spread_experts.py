"""A training of a mixture goes on with processes that spread its experts, and without them; what it drops is counted."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from foundation.core.target import Parallel
from foundation.machine.parallel import ALONE, joined
from foundation.models.checkpoint import load
from foundation.training.finetune import Finetune
from tests import tiny_language_models
from tests.distill import processes
from tests.distill.processes import Killed, dying, run
from tests.ranks import in_ranks

pytestmark = [pytest.mark.whole, pytest.mark.slow]

STAGE = Finetune(**{**processes.STEADY, "epochs": 1}, weight_decay=0.1)  # type: ignore[arg-type]
"""Ten steps."""
KIND = "mixture"


def begun_by_one(folder: Path) -> None:
    with dying(4), contextlib.suppress(Killed):
        run(folder, KIND, STAGE, folder / "killed alone", folder / "begun by one", ALONE)


def in_two(folder: Path) -> None:
    """Goes on with what one process began, and begins what one goes on with; drops choices in another training."""
    with joined() as first:
        parallel = Parallel(experts=2)
        team = parallel.of(first)

        def ran(name: str, scratch: Path, section: Parallel = parallel) -> dict[str, Any]:
            return run(folder, KIND, STAGE, folder / (name if team.is_first else f"{name}.{team.rank}"), scratch, team, section)

        with dying(4), contextlib.suppress(Killed):
            ran("killed in two", folder / "begun by two")
        found = {"moved to two": ran("moved to two", folder / "begun by one")}
        tight = parallel.model_copy(update={"expert_capacity": 0.5})
        found["tight"] = ran("tight", folder / "tight scratch", tight)
        with dying(4), contextlib.suppress(Killed):
            ran("killed tight", folder / "tight again", tight)
        found["resumed tight"] = ran("resumed tight", folder / "tight again", tight)
        found["wide"] = ran("wide", folder / "wide scratch", parallel.model_copy(update={"expert_capacity": 100.0}))
        if first.is_first:
            (folder / "results.json").write_text(json.dumps(found))


def test_it_goes_on_with_another_number_of_processes_and_counts_what_it_drops(tmp_path: Path) -> None:
    tiny_language_models.write(tmp_path / KIND, **processes.WRITES[KIND])
    begun_by_one(tmp_path)
    in_ranks(2, in_two, tmp_path)
    both = json.loads((tmp_path / "results.json").read_text())
    whole = run(tmp_path, KIND, STAGE, tmp_path / "whole", tmp_path / "whole scratch", ALONE)
    one = run(tmp_path, KIND, STAGE, tmp_path / "moved to one", tmp_path / "begun by two", ALONE)
    expected = load(tmp_path / "whole").state_dict()
    for name, found in (("moved to two", both["moved to two"]), ("moved to one", one)):
        assert len(found["norms"]) == 6, name  # four steps were taken before the kill
        for mine, theirs in zip(found["losses"], whole["losses"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4), name
        for key, value in load(tmp_path / name).state_dict().items():
            assert float((value - expected[key]).abs().mean()) < 1e-5, (name, key)
    assert 0.4 < both["tight"]["dropped_expert_choices"] < 0.7  # an even router would drop half
    assert both["resumed tight"]["dropped_expert_choices"] == both["tight"]["dropped_expert_choices"]
    assert both["wide"]["dropped_expert_choices"] == 0
    assert "dropped_expert_choices" not in one
    assert [entry["loss"] for entry in both["wide"]["losses"]] == pytest.approx([entry["loss"] for entry in whole["losses"]], abs=1e-4)
    assert abs(both["tight"]["losses"][-1]["loss"] - whole["losses"][-1]["loss"]) > 1e-3
