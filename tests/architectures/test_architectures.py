"""Every step on tiny models of every architecture of the table, against the results that the documentation shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.architectures.steps import COLUMNS, tried
from tests.architectures.table import ARCHITECTURES
from tests.architectures.write import RESULTS
from tests.seldom import seldom

SHOWN = json.loads(RESULTS.read_text(encoding="utf-8"))
WHOLE = {
    "albert": ("export",),  # one layer, several GEMMs
    "deberta-v2 (share_att_key)": ("prune",),  # one layer reads rows and positions
    "swinv2": ("export",),  # layers without a GEMM
    "gpt_neox": ("prune", "distil"),  # query, key and value head by head
    "clip": ("prune", "distil"),  # a config in the config
    "xmod": ("finetune",),  # does not run in bfloat16
    "beit": ("distil",),  # a backbone that names its stages
    "resnet": ("qat",),  # blocks of convolutions and batch norms
    "bart": ("distil", "prune"),  # two stacks of layers, and a head that reads the decoder
    "t5": ("prune",),  # a table of positions that all layers of a side share
    "squeezebert": ("export",),  # convolutions along a text
    "llama": ("kernels",),  # rotary positions, a gate, and heads of keys that queries share
}
"""Architectures that each stand for one way in which models differ, with the steps that show it."""
DONE = ("yes", "tied and apart", "heads", "neurons", "heads and experts")
"""What a step says that did what it was asked, or the part of it that the architecture allows."""


def test_results_cover_the_table() -> None:
    assert list(SHOWN) == list(ARCHITECTURES)
    for name, steps in SHOWN.items():
        assert set(steps) == ({*COLUMNS, "import"} if steps["import"] == "yes" else {"import"}), name


@pytest.mark.parametrize(
    ("step", "least"), [("plan", 70), ("rebuild", 100), ("quantize", 95), ("export", 85), ("prune", 50), ("distil", 60), ("kernels", 15)]
)
def test_most_architectures_can_do_a_step(step: str, least: int) -> None:
    done = [name for name, steps in SHOWN.items() if steps.get(step) in DONE]
    assert len(done) >= least, (step, len(done))


def test_no_reason_blames_the_user_for_the_architecture() -> None:
    reasons = [reason for steps in SHOWN.values() for reason in steps.values()]
    assert not [reason for reason in reasons if "check the sizes in its config" in reason or "None layers" in reason or "-1" in reason]


@pytest.mark.first(1)
@pytest.mark.whole
@pytest.mark.usefixtures("engines_inside")
@pytest.mark.parametrize("name", seldom(WHOLE, ("swinv2", "albert")))
def test_each_way_in_which_models_differ(name: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[name]
    if WHOLE[name] == ("export",) and "num_hidden_layers" in architecture.config:  # the exporter takes seconds for each layer
        architecture = replace(architecture, config={**architecture.config, "num_hidden_layers": 1})
    found = tried(architecture, tmp_path, WHOLE[name])
    assert found == {step: SHOWN[name][step] for step in found}
    assert set(found.values()) <= set(DONE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_step(name: str, tmp_path: Path) -> None:
    assert tried(ARCHITECTURES[name], tmp_path) == SHOWN[name]
