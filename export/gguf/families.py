"""The models that GGUF files hold, by model type: the architecture in llama.cpp, and its numbers.

Names of tensors come from the package `gguf` (`get_tensor_name_map`), as in llama.cpp's own converter. In the architecture `llama` RoPE
turns neighbouring dimensions of queries and keys, in Transformers dimensions i and i + D / 2. Their rows are therefore reordered:

    row 2 i + j of a head  <-  row i + j D / 2        0 <= i < D / 2, j in {0, 1}

RoPE with the scaling of Llama 3 is a factor for each frequency (`rope_freqs`), and linear scaling a number.

Left out: layers of unequal size, sliding windows, other RoPE scalings, experts; classes of BERT other than text embedding models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foundation.core.named import one_of
from foundation.models.heads.embedding import EMBEDDING_KEY
from foundation.models.own_shape import SHAPE_KEY

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedConfig

POOLINGS = {"mean": 1, "cls": 2, "last": 3}
"""`pooling_type` of llama.cpp."""
ROPES = ("default", "linear", "llama3")
ERF_GELU = ("gelu", "gelu_python")
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


@dataclass(frozen=True)
class Family:
    """What llama.cpp calls a model."""

    arch: str
    """Architecture, a value of `gguf.MODEL_ARCH_NAMES`."""
    describe: Callable[[PreTrainedConfig, GGUFWriter], None]
    """Writes the numbers of the architecture."""
    problem: Callable[[PreTrainedConfig], str | None]
    """Why llama.cpp would compute something else; None where it does not."""
    embeds: bool = False
    """Whether answers are vectors of texts."""
    paired: bool = False
    """Whether RoPE turns neighbouring dimensions, so that rows of queries and keys are reordered."""
    unread: tuple[str, ...] = ()
    """Starts of the names of tensors on which no answer depends."""
    always_float32: tuple[str, ...] = ()
    """Names of matrices that llama.cpp reads as F32."""


def problem(config: PreTrainedConfig, decodes: bool) -> str | None:
    """Returns in one line why no file can be written of a model; None where one can.

    Args:
        config: Its Transformers config.
        decodes: Whether it is a language model.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        return f"a model of the type {config.model_type}: {one_of(list(FAMILIES))} is written"
    if family.embeds and not getattr(config, EMBEDDING_KEY, None):
        return f"a {config.model_type} whose answers are no vectors of texts: only text embedding models are written"
    if not family.embeds and not decodes:
        return f"a {config.model_type} with a head: only language models are written"
    if getattr(config, SHAPE_KEY, None):
        return "its layers differ in size or read a learned prefix, which llama.cpp does not load"
    return family.problem(config)


def row_order(config: PreTrainedConfig, name: str) -> Tensor | None:
    """Returns the order in which llama.cpp expects the rows of a tensor, int64 [O]; None where it is the same.

    Args:
        config: The Transformers config of the model.
        name: Name of the tensor in the checkpoint.
    """
    layer = name.rpartition(".")[0].rpartition(".")[2]
    if not FAMILIES[config.model_type].paired or layer not in ("q_proj", "k_proj"):
        return None
    heads = config.num_attention_heads if layer == "q_proj" else config.num_key_value_heads
    return torch.arange(heads * head_size(config)).view(heads, 2, -1).transpose(1, 2).flatten()


def head_size(config: PreTrainedConfig) -> int:
    """Returns the dimensions of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def frequency_factors(config: PreTrainedConfig) -> Tensor | None:
    """Returns what the frequencies of RoPE are divided by, float32 [D / 2]; None where they are as they are."""
    if FAMILIES[config.model_type].embeds or config.rope_parameters.get("rope_type", "default") != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = head_size(config)
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    factors: Tensor = plain / scaled
    return factors


def _sizes(config: PreTrainedConfig, writer: GGUFWriter) -> None:
    """Writes the numbers that every family has."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)


def _decoder(config: PreTrainedConfig, writer: GGUFWriter) -> None:
    size, rope = head_size(config), config.rope_parameters
    _sizes(config, writer)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type", "default") == "linear":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _decoder_problem(config: PreTrainedConfig) -> str | None:
    rope = config.rope_parameters
    kind, share = rope.get("rope_type", "default"), rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    if config.hidden_act not in ("silu", "swish"):
        return f"hidden_act {config.hidden_act}: llama.cpp computes silu"
    if kind not in ROPES:
        return f"RoPE scaling {kind}: {one_of(ROPES)} is written"
    if share not in (None, 1, 1.0):
        return "RoPE turns only a part of each head, which llama.cpp does not do for this architecture"
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = any(one != "full_attention" for one in types) if types else window is not None and window < config.max_position_embeddings
    return "attention in a sliding window, which llama.cpp does not do for this architecture" if slides else None


def _bert(config: PreTrainedConfig, writer: GGUFWriter) -> None:
    from gguf import PoolingType

    _sizes(config, writer)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_token_type_count(config.type_vocab_size)
    writer.add_pooling_type(PoolingType(POOLINGS[getattr(config, EMBEDDING_KEY)["pooling"]]))


def _bert_problem(config: PreTrainedConfig) -> str | None:
    pooling = getattr(config, EMBEDDING_KEY)["pooling"]
    if "dense" in getattr(config, EMBEDDING_KEY):
        return "a layer behind its pooling, which llama.cpp's bert has not"
    if pooling not in POOLINGS:
        return f"pooling {pooling}: {one_of(list(POOLINGS))} is written"
    if config.hidden_act not in (*ERF_GELU, *TANH_GELU):
        return f"hidden_act {config.hidden_act}: llama.cpp computes gelu"
    if getattr(config, "is_decoder", False):
        return "its attention is causal, and llama.cpp's bert has none"
    return None


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", _decoder, _decoder_problem, paired=True),
    "mistral": Family("llama", _decoder, _decoder_problem, paired=True),
    "qwen2": Family("qwen2", _decoder, _decoder_problem),
    "qwen3": Family("qwen3", _decoder, _decoder_problem),
    "bert": Family(
        "bert",
        _bert,
        _bert_problem,
        embeds=True,
        unread=("pooler.", "embeddings.position_ids"),
        always_float32=("position_embd.weight", "token_types.weight"),
    ),
    # rows are added above this line
}
"""By `model_type` of config.json."""
