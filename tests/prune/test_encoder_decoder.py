"""Pruned encoder-decoders answer as the large ones do with the same units silent, on either side, and survive saving and loading."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load, load_float, save
from prune.surgery import KeptUnits, shrink
from tests.export.generation.tiny_encoder_decoders import CONFIGS, DIFFERENT, checkpoint, preprocessor
from tests.export.generation.tiny_encoder_decoders import sources as drawn_sources
from tests.seldom import seldom

pytestmark = pytest.mark.whole

KEY = "stages.prune"
WITH_TABLES = ("t5", "mt5", "umt5", "longt5")
"""Kinds whose heads stay: a table of relative positions has an entry for each."""
ENCODER, DECODER, HEADS, HEAD_DIM = 2, 3, 4, 8
FFN = {"encoder": 64, "decoder": 64}
FEW = settings(max_examples=2)


def features(seed: int = 0) -> dict[str, Tensor]:
    from foundation.standalone.preprocess import TokenPair

    pairs = zip(drawn_sources((3, 9, 12), seed), drawn_sources((7, 1, 11), seed + 1), strict=True)
    return {name: torch.from_numpy(value) for name, value in preprocessor().encode([TokenPair(*pair) for pair in pairs]).items()}


def logits(model: Any, seed: int = 0) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**features(seed)).logits
    return found


def is_t5(kind: str) -> bool:
    return "t5" in kind


def parts(model: Any, kind: str, side: str, layer: int) -> dict[str, nn.Linear]:
    """Returns, by their names in Transformers, the layers that read the heads, the heads that read the encoder, and the neurons."""
    if is_t5(kind):
        block = getattr(model, side).block[layer].layer
        own = getattr(block[0], "SelfAttention", None) or block[0].LocalSelfAttention
        found = {"heads": own.o, "ffn": block[-1].DenseReluDense.wo}
        return found | ({"cross": block[1].EncDecAttention.o} if side == "decoder" else {})
    block = getattr(model.model, side).layers[layer]
    found = {"heads": block.self_attn.out_proj, "ffn": block.fc2}
    return found | ({"cross": block.encoder_attn.out_proj} if side == "decoder" else {})


def without_layers(model: Any, kind: str, side: str, kept: list[int]) -> None:
    """Removes layers of one side; the module that computes T5's relative positions moves to the first that is left."""
    stack = getattr(model, side) if is_t5(kind) else getattr(model.model, side)
    name = "block" if is_t5(kind) else "layers"
    blocks = getattr(stack, name)
    chosen = nn.ModuleList([blocks[layer] for layer in kept])
    if is_t5(kind) and kind != "umt5" and kept[0] != 0:
        of = lambda block: getattr(block.layer[0], "SelfAttention", None) or block.layer[0].LocalSelfAttention  # noqa: E731
        of(chosen[0]).relative_attention_bias, of(chosen[0]).has_relative_attention_bias = of(blocks[0]).relative_attention_bias, True
    setattr(stack, name, chosen)


def naive(model: Any, kind: str, kept: KeptUnits) -> Any:
    """Written out: the large model with zeros where what is gone is read, and without the layers that go."""
    large = copy.deepcopy(model)
    for side, first, depth in (("encoder", 0, ENCODER), ("decoder", ENCODER, DECODER)):
        for layer in range(depth):
            for what, reader in parts(large, kind, side, layer).items():
                width = 1 if what == "ffn" else HEAD_DIM
                for unit in range(reader.in_features // width):
                    if unit not in kept.units(first + layer, what):  # type: ignore[arg-type]
                        reader.weight.data[:, unit * width : (unit + 1) * width] = 0
        without_layers(large, kind, side, [layer - first for layer in kept.layers if first <= layer < first + depth])
    return large


@st.composite
def subset(draw: st.DrawFn, number: int) -> tuple[int, ...]:
    return tuple(sorted(draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=number))))


@st.composite
def units(draw: st.DrawFn, structure: Structure, heads: bool) -> KeptUnits:
    everything = KeptUnits.everything(structure.sizes)
    layers = [*draw(subset(ENCODER)), *(ENCODER + layer for layer in draw(subset(DECODER)))]
    ffn = [draw(subset(number)) for number in structure.sizes.ffn]
    kept = replace(everything, layers=layers, ffn=ffn)
    if not heads:
        return kept
    of_heads = [draw(subset(HEADS)) for _ in structure.sizes.heads]
    return replace(kept, heads=of_heads, cross=[draw(subset(number)) if number else () for number in structure.sizes.cross])


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", seldom(CONFIGS, CONFIGS.keys() - DIFFERENT))
@FEW
@given(data=st.data())
def test_the_small_model_is_the_large_one_with_the_rest_silent(kind: str, data: st.DataObject, tmp_path_factory: Any) -> None:
    model = load_float(checkpoint(kind))
    structure = Structure.of(model, KEY)
    kept = data.draw(units(structure, kind not in WITH_TABLES))
    small: Any = shrink(model, structure, kept, KEY)
    expected = logits(naive(model, kind, kept))
    torch.testing.assert_close(logits(small), expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-5)
    assert Structure.of(small, KEY).sizes.same(kept.sizes(structure.sizes))
    folder: Path = tmp_path_factory.mktemp("small")
    save(small, checkpoint(kind), folder, "Pruned")
    torch.testing.assert_close(logits(load(folder)), logits(small))


@pytest.mark.parametrize("kind", seldom(CONFIGS, CONFIGS.keys() - DIFFERENT))
def test_all_of_it_is_the_model_itself(kind: str) -> None:
    model = load_float(checkpoint(kind))
    structure = Structure.of(model, KEY)
    small: Any = shrink(model, structure, KeptUnits.everything(structure.sizes), KEY)
    assert small.config.to_dict() == model.config.to_dict()
    assert small.generation_config.to_dict() == model.generation_config.to_dict()
    assert all(torch.equal(value, small.state_dict()[name]) for name, value in model.state_dict().items())
