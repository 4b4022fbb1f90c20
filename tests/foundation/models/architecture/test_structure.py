"""Blocks, attention and axes of every kind of model are found without a name: checked against the names that Transformers gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from foundation.core.errors import InputError
from foundation.models.architecture.attention import find_attentions
from foundation.models.architecture.axes import axes_of
from foundation.models.architecture.blocks import stacks_of, with_layers
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load_float
from foundation.models.layers.conv1d import with_linears
from tests.architectures.steps import drawn
from tests.architectures.table import ARCHITECTURES
from tests.export.generation.tiny_encoder_decoders import CONFIGS, checkpoint

SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
TEXT = {"vocab_size": 20, "max_position_embeddings": 40, "pad_token_id": 0}
ENDS = {"bos_token_id": 2, "eos_token_id": 3}
KEY = "stages.prune"
MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **TEXT)),
    "electra": lambda: transformers.ElectraForSequenceClassification(transformers.ElectraConfig(**SIZES, **TEXT, embedding_size=12)),
    "distilbert": lambda: transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(vocab_size=20, n_layers=2, dim=16, n_heads=4, hidden_dim=24)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=16, n_head=4, n_inner=24, vocab_size=20, **ENDS)
    ),
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, image_size=8, patch_size=4, num_channels=1)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **TEXT, **ENDS, num_key_value_heads=2)),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            hidden_size=16, num_hidden_layers=2, ffn_dim=24, num_attention_heads=4, word_embed_proj_dim=16, **TEXT, **ENDS
        )
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, **TEXT, **ENDS, num_key_value_heads=2, num_local_experts=4)
    ),
}
ATTENTION = {  # query, key, value and output of block 1, and whether queries and keys are turned
    "bert": ("bert.encoder.layer.1.attention.self.{}", ("query", "key", "value"), "bert.encoder.layer.1.attention.output.dense", False),
    "electra": (
        "electra.encoder.layer.1.attention.self.{}",
        ("query", "key", "value"),
        "electra.encoder.layer.1.attention.output.dense",
        False,
    ),
    "distilbert": (
        "distilbert.transformer.layer.1.attention.{}",
        ("q_lin", "k_lin", "v_lin"),
        "distilbert.transformer.layer.1.attention.out_lin",
        False,
    ),
    "gpt2": ("transformer.h.1.attn.{}", ("c_attn", "c_attn", "c_attn"), "transformer.h.1.attn.c_proj", False),
    "vit": ("vit.layers.1.attention.{}", ("q_proj", "k_proj", "v_proj"), "vit.layers.1.attention.o_proj", False),
    "llama": ("model.layers.1.self_attn.{}", ("q_proj", "k_proj", "v_proj"), "model.layers.1.self_attn.o_proj", True),
    "opt": ("model.decoder.layers.1.self_attn.{}", ("q_proj", "k_proj", "v_proj"), "model.decoder.layers.1.self_attn.out_proj", True),
    "mixtral": ("model.layers.1.self_attn.{}", ("q_proj", "k_proj", "v_proj"), "model.layers.1.self_attn.o_proj", True),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_layers_around_attention_are_found(kind: str) -> None:
    found = find_attentions(with_linears(MODELS[kind]()), KEY).own
    pattern, names, output, turned = ATTENTION[kind]
    places = range(3) if len(set(names)) == 1 else (0, 0, 0)
    expected = {what: (pattern.format(name), place) for what, name, place in zip(("query", "key", "value"), names, places, strict=True)}
    assert list(found) == [0, 1]
    assert (found[1].parts, found[1].output, found[1].transformed) == (expected, output, turned)
    grouped = 2 if kind in ("llama", "mixtral") else 4
    assert (found[1].heads, found[1].key_value_heads, found[1].head_dim) == (4, grouped, 4)
    assert found[1].scaling == (1.0 if kind == "opt" else 0.5)  # OPT scales its queries itself


@pytest.mark.parametrize("kind", MODELS)
def test_every_axis_is_explained_by_its_size(kind: str) -> None:
    """Every axis that has the length of a size, where no two sizes are alike, follows that size."""
    model = with_linears(MODELS[kind]())
    structure, axes = Structure.of(model, KEY), axes_of(model, KEY)
    ffn = 24
    for name, value in model.state_dict().items():
        for axis, length in enumerate(value.shape):
            where = name, axis
            if length in (ffn, 2 * ffn) and not (kind == "gpt2" and "c_attn" in name):
                assert where in axes.ffn, where
                assert axes.repeated.get(where, 1) == length // ffn
            if where in axes.ffn:
                assert length in (ffn, 2 * ffn)
            if where in axes.vocabulary:
                assert length == 20
            if where in structure.residual:
                assert length == 16
    assert bool(axes.experts) == (kind == "mixtral")
    assert structure.sizes.ffn == (ffn, ffn)
    assert structure.sizes.experts == ((4, 4) if kind == "mixtral" else (0, 0))


def test_channels_of_the_stream_and_numbers_of_heads_are_told_apart() -> None:
    structure = Structure.of(MODELS["bert"](), KEY)
    assert ("bert.encoder.layer.0.attention.self.query.weight", 0) not in structure.residual
    assert ("bert.encoder.layer.0.attention.self.query.weight", 1) in structure.residual
    assert structure.heads[0]["bert.encoder.layer.0.attention.output.dense.weight", 1] == (("query", 0),)
    assert ("bert.encoder.layer.0.attention.output.dense.weight", 0) in structure.residual


def test_a_factored_embedding_is_no_channel_of_the_stream() -> None:
    structure = Structure.of(MODELS["electra"](), KEY)
    assert ("electra.embeddings.word_embeddings.weight", 1) not in structure.residual
    assert ("electra.embeddings_project.weight", 0) in structure.residual


def test_it_is_found_in_inference_mode_too() -> None:
    model = with_linears(MODELS["gpt2"]())
    model.config.unused = "so that it was not looked at before"
    with torch.inference_mode():
        assert find_attentions(model, KEY).own[1].parts["value"] == ("transformer.h.1.attn.c_attn", 2)


def test_looking_changes_nothing() -> None:
    model = MODELS["llama"]()
    before, config = {name: value.clone() for name, value in model.state_dict().items()}, model.config.to_dict()
    with torch.random.fork_rng():
        state = torch.random.get_rng_state()
        Structure.of(model, KEY)
        assert torch.equal(torch.random.get_rng_state(), state)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: transformers.SqueezeBertForSequenceClassification(transformers.SqueezeBertConfig(**SIZES, **TEXT, embedding_size=16)),
            "2 of 2 blocks of this squeezebert have no attention between linear layers",
        ),
        (
            lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig(hidden_sizes=[8, 8], depths=[1, 1])),
            "this resnet is made of stages of different sizes",
        ),
        (
            lambda: transformers.AlbertForSequenceClassification(transformers.AlbertConfig(**SIZES, **TEXT)),
            "albert has 1 blocks for 2 layers",
        ),
    ],
)
def test_what_cannot_be_told_is_said(model: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Structure.of(model(), KEY)


TOLD_BY_SOFTMAX = {  # layer of query, key and value of block 1; whether they are in it head by head
    "gpt_neox": ("gpt_neox.layers.1.attention.{}", ("query_key_value",) * 3, True),
    "phi3": ("model.layers.1.self_attn.{}", ("qkv_proj",) * 3, False),
    "modernbert": ("model.layers.1.attn.{}", ("Wqkv",) * 3, False),
    "deberta-v2 (share_att_key)": ("deberta.encoder.layer.1.attention.self.{}", ("query_proj", "key_proj", "value_proj"), False),
    "gptj": ("transformer.h.1.attn.{}", ("q_proj", "k_proj", "v_proj"), False),
    "megatron-bert": ("bert.encoder.layer.1.attention.self.{}", ("query", "key", "value"), False),
}


@pytest.mark.parametrize("kind", TOLD_BY_SOFTMAX)
def test_fused_layers_and_softmaxes_tell_the_attention(kind: str) -> None:
    found = find_attentions(with_linears(drawn(ARCHITECTURES[kind])), KEY).own[1]
    pattern, names, interleaved = TOLD_BY_SOFTMAX[kind]
    places = range(3) if len(set(names)) == 1 else (0, 0, 0)
    expected = {what: (pattern.format(name), place) for what, name, place in zip(("query", "key", "value"), names, places, strict=True)}
    assert (found.parts, found.interleaved) == (expected, interleaved)
    assert (found.heads, found.key_value_heads, found.head_dim) == (4, 2 if kind == "phi3" else 4, 8)


def test_blocks_are_the_largest_list_of_modules_of_one_class() -> None:
    model = MODELS["bert"]()
    model.small = nn.ModuleList([nn.Linear(2, 2) for _ in range(9)])
    assert stacks_of(model, KEY)[0].prefix == "bert.encoder.layer"


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", CONFIGS)
def test_an_encoder_decoder_has_two_stacks(kind: str) -> None:
    """Checked against the names of Transformers: 2 layers of the encoder, then 3 of the decoder, which also read the encoder."""
    model, t5 = load_float(checkpoint(kind)), "t5" in kind
    structure = Structure.of(model, KEY)
    prefixes = ("encoder.block", "decoder.block") if t5 else ("model.encoder.layers", "model.decoder.layers")
    assert [(stack.prefix, stack.numbers) for stack in structure.stacks] == [(prefixes[0], range(2)), (prefixes[1], range(2, 5))]
    assert structure.blocks == (*(f"{prefixes[0]}.{place}" for place in range(2)), *(f"{prefixes[1]}.{place}" for place in range(3)))
    assert (structure.sizes.heads, structure.sizes.cross) == ((4,) * 5, (0, 0, 4, 4, 4))
    assert structure.sizes.ffn == ((64,) * 5 if t5 else (64, 64, 48, 48, 48))
    cross, own = structure.cross_attentions[3], structure.attentions[3]
    names = ("EncDecAttention", "SelfAttention") if t5 else ("encoder_attn", "self_attn")
    assert all(names[0] in layer for layer, _ in cross.parts.values())
    assert names[0] in cross.output
    assert all(names[1] in layer for layer, _ in own.parts.values())
    assert names[1] in own.output
    assert bool(structure.tables) == t5
    assert all("attention_bias" in name for name in structure.tables)
    gated = [name for name, axis in structure.ffn[0] if axis == 0 and name.endswith("weight")]
    assert len(gated) == (2 if kind in ("mt5", "umt5") else 1)


def test_layers_of_both_stacks_are_cut_by_one_list() -> None:
    bart = transformers.BartConfig(encoder_layers=3, decoder_layers=2)
    bart.compress_architecture = {"model_type": "bart", "heads": [1, 2, 3, 4, 5], "cross": [0, 0, 0, 4, 5]}
    cut = with_layers(bart, (0, 2, 4))
    assert (cut.encoder_layers, cut.decoder_layers) == (2, 1)
    assert cut.compress_architecture == {"model_type": "bart", "heads": [1, 3, 5], "cross": [0, 0, 5]}
    t5 = with_layers(transformers.T5Config(num_layers=3, num_decoder_layers=4), (1, 3, 4, 6))
    assert (t5.num_layers, t5.num_decoder_layers) == (1, 3)


def test_what_a_config_says_of_each_layer_is_cut_with_them() -> None:
    config = transformers.BertConfig(**{**SIZES, "num_hidden_layers": 3})
    config.compress_architecture = {"model_type": "bert", "head_dim": 4, "heads": [1, 2, 3], "ffn": [4, 5, 6]}
    config.layer_types = ["a", "b", "c"]
    cut = with_layers(config, (2, 0))
    assert cut.compress_architecture == {"model_type": "bert", "head_dim": 4, "heads": [3, 1], "ffn": [6, 4]}
    assert (cut.num_hidden_layers, cut.layer_types, config.compress_architecture["heads"]) == (2, ["c", "a"], [1, 2, 3])


def test_lists_of_a_config_follow_the_layers() -> None:
    smollm = transformers.SmolLM3Config(**{**SIZES, "num_hidden_layers": 4}, **TEXT, no_rope_layers=[1, 0, 1, 0])
    assert with_layers(smollm, [1, 2, 3]).no_rope_layers == [0, 1, 0]
    assert len(with_layers(smollm, [0, 3]).layer_types) == 2
    assert with_layers(smollm, [1, 1, 0]).no_rope_layers == [0, 0, 1]
    assert smollm.no_rope_layers == [1, 0, 1, 0]
    for layers, expected in (([1, 2, 3], [1]), ([0, 3], [0]), ([2, 2, 1], [0, 1]), ([1], [])):
        moe = transformers.Qwen3MoeConfig(**{**SIZES, "num_hidden_layers": 4}, **TEXT, mlp_only_layers=[0, 2])
        assert with_layers(moe, layers).mlp_only_layers == expected
    full = transformers.Qwen3MoeConfig(**{**SIZES, "num_hidden_layers": 3}, **TEXT, mlp_only_layers=[0, 1, 2])
    assert with_layers(full, [0, 2]).mlp_only_layers == [0, 1]  # numbers, though as many as layers


def test_lists_of_other_things_stay() -> None:
    images = transformers.ViTConfig(**SIZES, image_size=[8, 12], patch_size=[4, 4])
    cut = with_layers(images, [1])
    assert (list(cut.image_size), list(cut.patch_size)) == ([8, 12], [4, 4])
    text = transformers.LlamaConfig(**SIZES, **TEXT, eos_token_id=[2, 3])
    assert with_layers(text, [0]).eos_token_id == [2, 3]
