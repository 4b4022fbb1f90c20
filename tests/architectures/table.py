"""Tiny models of many architectures: what `compress` is said to take is tried on each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foundation.labels.tasks import Task

LAYERS, HIDDEN, HEADS, FFN = 3, 32, 4, 64
LENGTH, VOCABULARY, IMAGE = 16, 64, 32


@dataclass(frozen=True)
class Architecture:
    """A tiny model of one architecture, or of one of its variants."""

    task: Task
    config: Mapping[str, Any]
    """Keys of its Transformers config, with `model_type`."""


SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": FFN}
ENCODER = {**SIZES, "max_position_embeddings": 40, "type_vocab_size": 2}
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 40}
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
GPT = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 40}
PIXELS = {"image_size": IMAGE, "patch_size": 8, "num_channels": 3}
WIDE = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
ViT = {**SIZES, **PIXELS}
SEQ2SEQ = {
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": FFN,
    "decoder_ffn_dim": FFN,
    "max_position_embeddings": 40,
}
T5 = {
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": FFN,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 1,
}
SPARSE = {"num_experts": 4, "expert_capacity": 64}
STAGES = {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 24, 32, 40], "num_channels": 3}
SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 2, "num_channels": 3}


def _text(model_type: str, **keys: Any) -> Architecture:
    return Architecture("text-classification", {"model_type": model_type, **keys})


def _image(model_type: str, **keys: Any) -> Architecture:
    return Architecture("image-classification", {"model_type": model_type, **keys})


def _answers(model_type: str, **keys: Any) -> Architecture:
    return Architecture("text-to-text", {"model_type": model_type, **keys})


def _causal(model_type: str, **keys: Any) -> Architecture:
    return Architecture("text-generation", {"model_type": model_type, **keys})


ENCODERS: dict[str, Architecture] = {
    **{
        kind: _text(kind, **ENCODER)
        for kind in (
            "bert",
            "roberta",
            "camembert",
            "xlm-roberta",
            "electra",
            "deberta",
            "ernie",
            "megatron-bert",
            "rembert",
            "data2vec-text",
            "roberta-prelayernorm",
            "layoutlm",
            "roformer",
            "ibert",
            "roc_bert",
        )
    },
    "albert": _text("albert", **ENCODER, embedding_size=16),
    "big_bird": _text("big_bird", **ENCODER, attention_type="original_full"),
    "canine": _text("canine", **ENCODER, num_hash_buckets=64, local_transformer_stride=16),
    "convbert": _text("convbert", **ENCODER, embedding_size=16),
    "deberta-v2": _text("deberta-v2", **ENCODER, relative_attention=True, position_buckets=8, pos_att_type=["c2p", "p2c"]),
    "deberta-v2 (share_att_key)": _text(
        "deberta-v2", **ENCODER, relative_attention=True, position_buckets=8, pos_att_type=["c2p", "p2c"], share_att_key=True
    ),
    "distilbert": _text("distilbert", dim=HIDDEN, n_layers=LAYERS, n_heads=HEADS, hidden_dim=FFN, max_position_embeddings=40),
    "esm": _text("esm", **SIZES, max_position_embeddings=40, position_embedding_type="rotary"),
    "eurobert": _text("eurobert", **DECODER),
    "flaubert": _text("flaubert", emb_dim=HIDDEN, n_layers=LAYERS, n_heads=HEADS, max_position_embeddings=40),
    "fnet": _text("fnet", hidden_size=HIDDEN, num_hidden_layers=LAYERS, intermediate_size=FFN, max_position_embeddings=40),
    "funnel": _text("funnel", d_model=HIDDEN, n_head=HEADS, d_head=8, d_inner=FFN, block_sizes=[2, 2], num_decoder_layers=1),
    "lilt": _text("lilt", **{**ENCODER, "hidden_size": 48}),
    "longformer": _text("longformer", **ENCODER, attention_window=8),
    "luke": _text("luke", **ENCODER, entity_vocab_size=8, entity_emb_size=16),
    "mobilebert": _text(
        "mobilebert",
        **{**ENCODER, "intra_bottleneck_size": 16, "embedding_size": 16, "num_feedforward_networks": 2, "true_hidden_size": 16},
    ),
    "modernbert": _text("modernbert", **SIZES, max_position_embeddings=40, global_attn_every_n_layers=2, local_attention=8),
    "mpnet": _text("mpnet", **SIZES, max_position_embeddings=40),
    "nomic_bert": _text("nomic_bert", **ENCODER),
    "nystromformer": _text("nystromformer", **{**ENCODER, "max_position_embeddings": 64}, segment_means_seq_len=64),
    "squeezebert": _text("squeezebert", **ENCODER, embedding_size=HIDDEN),
    "xlm": _text("xlm", emb_dim=HIDDEN, n_layers=LAYERS, n_heads=HEADS, max_position_embeddings=40),
    "xlnet": _text("xlnet", d_model=HIDDEN, n_layer=LAYERS, n_head=HEADS, d_inner=FFN),
    "xmod": _text("xmod", **ENCODER, default_language="en_XX"),
    "yoso": _text("yoso", **ENCODER),
}
VISION: dict[str, Architecture] = {
    **{kind: _image(kind, **ViT) for kind in ("vit", "deit", "vit_msn", "ijepa")},
    "beit": _image("beit", **ViT, use_relative_position_bias=True),
    "data2vec-vision": _image("data2vec-vision", **ViT, use_relative_position_bias=True),
    "dinov2": _image("dinov2", **WIDE, **PIXELS, mlp_ratio=2),
    "dinov2_with_registers": _image("dinov2_with_registers", **WIDE, **PIXELS, mlp_ratio=2),
    "clip": _image("clip", vision_config=ViT, text_config={**SIZES, "vocab_size": 99}, projection_dim=HIDDEN),
    "siglip": _image("siglip", vision_config=ViT, text_config={**SIZES, "vocab_size": 99}),
    "swin": _image("swin", **SWIN),
    "swinv2": _image("swinv2", **SWIN),
    "convnext": _image("convnext", **STAGES, patch_size=4, image_size=IMAGE),
    "convnextv2": _image("convnextv2", **STAGES, patch_size=4, image_size=IMAGE),
    "resnet": _image("resnet", **STAGES, embedding_size=16, layer_type="basic"),
    "regnet": _image("regnet", **STAGES, embedding_size=16, groups_width=8),
    "cvt": _image("cvt", embed_dim=[16, 32, 32], num_heads=[1, 2, 2], depth=[1, 2, 3]),
    "hiera": _image("hiera", embed_dim=16, image_size=[64, 64], depths=[1, 1, 2], num_heads=[1, 2, 4], num_query_pool=2,
                    masked_unit_attention=[True, False, False]),
    "levit": _image("levit", image_size=64, hidden_sizes=[16, 32, 48], num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8],
                    mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2]),
    "mobilevit": _image("mobilevit", image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 16, 24, 32]),
    "mobilevitv2": _image("mobilevitv2", image_size=64, base_attn_unit_dims=[16, 24, 32], width_multiplier=0.25),
    "poolformer": _image("poolformer", depths=[1, 1, 2, 1], hidden_sizes=[16, 24, 32, 40], patch_size=7, num_channels=3),
    "pvt": _image("pvt", image_size=64, depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2, 4, 4],
                  mlp_ratios=[2, 2, 2, 2], num_labels=2),
    "pvt_v2": _image("pvt_v2", image_size=64, depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2, 4, 4],
                     mlp_ratios=[2, 2, 2, 2]),
    "segformer": _image("segformer", depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2, 4, 4],
                        decoder_hidden_size=32),
}  # fmt: skip
DECODERS: dict[str, Architecture] = {
    **{
        kind: _causal(kind, **DECODER)
        for kind in (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "olmo",
            "olmo2",
            "phi3",
            "stablelm",
            "starcoder2",
            "granite",
            "cohere",
            "glm",
            "smollm3",
        )
    },
    "helium": _causal("helium", **DECODER, head_dim=8),
    "bloom": _causal("bloom", hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS),
    "falcon": _causal("falcon", **WIDE, ffn_hidden_size=FFN, multi_query=True, new_decoder_architecture=False),
    "gemma3_text": _causal("gemma3_text", **DECODER, head_dim=8, sliding_window=8),
    "gpt2": _causal("gpt2", **GPT),
    "gpt2 (classification)": _text("gpt2", **GPT),
    "gpt_bigcode": _causal("gpt_bigcode", **GPT),
    "gpt_neo": _causal(
        "gpt_neo", hidden_size=HIDDEN, num_layers=4, num_heads=HEADS, max_position_embeddings=40, attention_types=[[["global", "local"], 2]]
    ),
    "gpt_neox": _causal("gpt_neox", **SIZES, max_position_embeddings=40),
    "gptj": _causal("gptj", **GPT, rotary_dim=4),
    "llama (classification)": _text("llama", **DECODER),
    "mixtral": _causal("mixtral", **DECODER, num_local_experts=4),
    "opt": _causal("opt", hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, ffn_dim=FFN, word_embed_proj_dim=HIDDEN,
                   max_position_embeddings=40),
    "phi": _causal("phi", **{**DECODER, "num_key_value_heads": HEADS}),
    "qwen2_moe": _causal("qwen2_moe", **DECODER, **MOE, num_experts=4, shared_expert_intermediate_size=32),
    "qwen3_moe": _causal("qwen3_moe", **DECODER, **MOE, num_experts=4),
}  # fmt: skip
ENCODER_DECODERS: dict[str, Architecture] = {
    "bart": _text("bart", **SEQ2SEQ),
    "mbart": _text("mbart", **SEQ2SEQ),
    "t5": _text("t5", **T5),
    "mt5": _text("mt5", **T5),
    "t5 (text to text)": _answers("t5", **T5),
    "mt5 (text to text)": _answers("mt5", **T5, feed_forward_proj="gated-gelu"),
    "bart (text to text)": _answers("bart", **SEQ2SEQ),
    "umt5 (text to text)": _answers("umt5", **T5, feed_forward_proj="gated-gelu"),
    "marian (text to text)": _answers("marian", **SEQ2SEQ, decoder_start_token_id=1),
    "pegasus (text to text)": _answers("pegasus", **SEQ2SEQ, decoder_start_token_id=1),
    "m2m_100 (text to text)": _answers("m2m_100", **SEQ2SEQ),
    "switch_transformers (text to text)": _answers("switch_transformers", **T5, **SPARSE, num_sparse_encoder_layers=1,
                                                   num_sparse_decoder_layers=1),
    "nllb-moe (text to text)": _answers("nllb-moe", **SEQ2SEQ, **SPARSE, encoder_sparse_step=2, decoder_sparse_step=2),
}  # fmt: skip
ARCHITECTURES = ENCODERS | VISION | DECODERS | ENCODER_DECODERS
