"""Every architecture that ties weights is tried with them tied, and with each a weight of its own; the others as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foundation.core.errors import InputError
from foundation.models.architecture import attention
from foundation.models.architecture.blocks import Kind
from foundation.models.architecture.shapes import on_meta
from tests.architectures.rebuilt import difference, part, tied
from tests.architectures.steps import drawn
from tests.architectures.table import ARCHITECTURES
from tests.seldom import seldom

pytestmark = pytest.mark.whole

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
    "m2m_100 (text to text)",
    "marian (text to text)",
    "mbart",
    "mt5",
    "mt5 (text to text)",
    "opt",
    "pegasus (text to text)",
    "smollm3",
    "starcoder2",
    "t5",
    "t5 (text to text)",
    "umt5 (text to text)",
)
"""Architectures of the table that tie weights."""
OFTEN = {"gpt2", "t5 (text to text)", "bert"}
"""Ways that differ: a head, a head and tables of two stacks, and nothing."""
TRACED = {"bert", "gpt2", "vit", "t5", "mixtral", "gpt_neo", "resnet"}
"""One layer for each of query, key and value, one for all; two stacks, experts, a list of attentions of its own, and no attention."""


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


@pytest.mark.parametrize("name", seldom(ARCHITECTURES, ARCHITECTURES.keys() - TRACED))
def test_attention_is_found_alike_on_the_cpu_and_on_the_meta_device(name: str) -> None:
    """Small models are run on the CPU, on weights that may be anything."""
    for value in (float("nan"), float("inf")):
        [torch.full((10**power,), value) for power in range(1, 6)]  # memory that the weights may get
    found = []
    for small in (False, True):
        attention._attentions.cache_clear()
        try:
            found.append(attention._attentions(Kind.of(on_meta(drawn(ARCHITECTURES[name]).config)), "key", small))
        except InputError as error:
            found.append(str(error))
    assert found[0] == found[1]
