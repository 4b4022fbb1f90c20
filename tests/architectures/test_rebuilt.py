"""Every architecture that ties weights is tried with them tied, and with each a weight of its own; the others as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architectures.rebuilt import difference, part, tied
from tests.architectures.steps import drawn
from tests.architectures.table import ARCHITECTURES
from tests.seldom import seldom

TIED = (
    "bart",
    "bart (text to text)",
    "bloom",
    "cohere",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "mbart",
    "mt5",
    "mt5 (text to text)",
    "opt",
    "smollm3",
    "starcoder2",
    "t5",
    "t5 (text to text)",
)
"""Architectures of the table that tie weights."""
OFTEN = {"gpt2", "t5 (text to text)", "bert"}
"""Ways that differ: a head, a head and tables of two stacks, and nothing."""


@pytest.mark.parametrize("name", seldom(ARCHITECTURES, ARCHITECTURES.keys() - OFTEN))
def test_a_model_built_again_is_its_source(name: str, tmp_path: Path) -> None:
    model = drawn(ARCHITECTURES[name])
    assert bool(tied(model)) == (name in TIED)
    assert difference(ARCHITECTURES[name], model, tmp_path) is None


@pytest.mark.parametrize("name", seldom(TIED, [name for name in TIED if name not in OFTEN]))
def test_a_model_built_again_is_its_source_with_weights_apart(name: str, tmp_path: Path) -> None:
    model = drawn(ARCHITECTURES[name])
    part(model)
    assert not tied(model)
    assert difference(ARCHITECTURES[name], model, tmp_path) is None
