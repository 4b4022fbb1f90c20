"""Surgery computes what the large model computes with the other units set to 0, in every way in which attention is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foundation.core.errors import InputError
from foundation.models.architecture.structure import Structure
from foundation.models.inputs.images import image_shape
from foundation.models.layers.conv1d import with_linears
from foundation.training.train import Batch
from prune.proof import prove
from prune.surgery import KeptUnits
from tests.architectures.steps import drawn
from tests.architectures.table import ARCHITECTURES, VOCABULARY
from tests.seldom import seldom

pytestmark = pytest.mark.whole

KEY = "stages.prune"
KINDS = (
    "gpt_neox",  # query, key and value head by head
    "phi3",  # query, key and value of unequal width in one layer
    "deberta-v2 (share_att_key)",  # positions go through the layers of queries and keys
    "modernbert",  # rotary positions made once for all layers
    "roformer",  # positions as wide as a head, in a weight
    "stablelm",  # turns a share of a head
    "gptj",  # divides scores by a tensor
    "opt",  # multiplies its queries itself
    "clip",  # sizes in a config inside the config
    "megatron-bert",  # reads the values of its mask
    "xmod",
)


def batch_of(name: str, model: torch.nn.Module) -> Batch:
    """Returns two rows."""
    if "clip" in name:
        features = {"pixel_values": torch.randn(2, *image_shape(model.config))}
    else:
        ids = torch.randint(4, VOCABULARY, (2, 9))
        features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Batch(features, torch.zeros(2, dtype=torch.long), torch.arange(2).numpy(), 0, 1)


def some_units(structure: Structure) -> KeptUnits:
    """Returns units to keep: in each layer other heads, and in each but the first another number of neurons."""
    kept = KeptUnits.everything(structure.sizes)
    heads = [[head for head in range(number) if head != layer % number] for layer, number in enumerate(structure.sizes.key_value_heads)]
    ffn = [[neuron for neuron in range(number) if neuron % (layer + 2)] for layer, number in enumerate(structure.sizes.ffn)]
    return replace(kept, heads=heads, ffn=ffn)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", seldom(KINDS, ("phi3", "roformer", "opt", "megatron-bert", "xmod")))
def test_the_smaller_model_is_the_large_one_without_the_units(name: str) -> None:
    model = with_linears(drawn(ARCHITECTURES[name]))
    structure = Structure.of(model, KEY)
    prove(model, structure, some_units(structure), batch_of(name, model), KEY)


def test_heads_that_depend_on_their_number_are_refused() -> None:
    """The slope of the positions of Bloom follows the number of a head."""
    model = with_linears(drawn(ARCHITECTURES["bloom"]))
    structure = Structure.of(model, KEY)
    with pytest.raises(InputError, match=r"a bloom without some of its heads or neurons .*it cannot be pruned"):
        prove(model, structure, some_units(structure), batch_of("bloom", model), KEY)
