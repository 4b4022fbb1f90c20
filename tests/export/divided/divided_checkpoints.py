"""Tiny quantized checkpoints to divide: families by schemes, with random weights and inputs to run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from export.divided.folder import write
from export.divided.placement import Placement
from export.divided.rank import folder_of
from export.divided.rank import load as load_rank
from export.divided.ranks import Meeting
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from foundation.models.layers.conv1d import stock_state
from foundation.models.layers.experts import with_separate_experts
from foundation.models.library import quiet
from foundation.schemes.attention_products import ProductScales, attention_modules
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.fp8 import Fp8Scales
from foundation.schemes.int4 import Int4Scales, group_range, group_scale
from foundation.schemes.int8 import DynamicScales, LayerScales, levels, weight_bits, weight_scale
from foundation.schemes.int8_weights import WeightScales
from foundation.schemes.scales import Scales
from foundation.schemes.sites import Sites, save_sites
from quantize.group_scales import Groups

GROUP = 8
BITS = weight_bits("cpu")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 60, "max_position_embeddings": 40, "num_labels": 3}
DECODER = {**SIZES, "vocab_size": 60, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[Callable[[], Any], Any]] = {
    "bert": (lambda: transformers.BertConfig(**TEXT), transformers.AutoModelForSequenceClassification),
    "distilbert": (
        lambda: transformers.DistilBertConfig(vocab_size=60, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=40),
        transformers.AutoModelForSequenceClassification,
    ),
    "modernbert": (
        lambda: transformers.ModernBertConfig(
            **TEXT, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, local_attention=8
        ),
        transformers.AutoModelForSequenceClassification,
    ),
    "vit": (lambda: transformers.ViTConfig(**SIZES, image_size=12, patch_size=4), transformers.AutoModelForImageClassification),
    "llama": (lambda: transformers.LlamaConfig(**DECODER), transformers.AutoModelForCausalLM),
    "qwen3": (lambda: transformers.Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=True), transformers.AutoModelForCausalLM),
    "gpt2": (
        lambda: transformers.GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=40),
        transformers.AutoModelForCausalLM,
    ),
    "mixtral": (
        lambda: transformers.MixtralConfig(**DECODER, num_local_experts=3, num_experts_per_tok=2),
        transformers.AutoModelForCausalLM,
    ),
    "qwen3-moe": (
        lambda: transformers.Qwen3MoeConfig(**DECODER, head_dim=8, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2),
        transformers.AutoModelForCausalLM,
    ),
}
_SCRATCH = tempfile.TemporaryDirectory(prefix="divided-")


def inputs(family: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(3, 3, 12, 12, generator=generator)}
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": torch.randint(3, 60, (3, 9), generator=generator), "attention_mask": mask}


def blocks_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns what is quantized: the linear layers of blocks but for routers."""
    inside = (".layer.", ".layers.", ".h.")
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and any(part in f".{name}" for part in inside) and not name.endswith(".gate")
    }


def scales_of(scheme: str, weight: Tensor, largest: float, smooth: Tensor | None = None, group: int = GROUP) -> Scales:
    made: dict[str, Callable[[], Scales]] = {
        "w8a8": lambda: LayerScales(weight_scale(weight, levels(BITS)), torch.tensor(largest / 127), BITS),
        "w8a8, smooth": lambda: LayerScales(weight_scale(weight, levels(BITS)), torch.tensor(largest / 127), BITS, smooth),
        "w8a8-dynamic": lambda: DynamicScales(weight_scale(weight, levels(BITS)), BITS, smooth),
        "w8a16": lambda: WeightScales(weight_scale(weight, 127)),
        "w4a16": lambda: Int4Scales(group_scale(weight, group), group),
        "w4a16, zero points": lambda: Int4Scales(group_range(weight, group).scale, group, group_range(weight, group).zero_point),
        "w4a16, two_level": lambda: Int4Scales.of_grid(Groups(group, symmetric=False, scales="two_level").grid(weight), group),
        "w4a16, k_quant": lambda: Int4Scales.of_grid(Groups(group, symmetric=False, scales="k_quant").grid(weight), group),
        "fp8": lambda: Fp8Scales(weight_scale(weight, 448), torch.tensor(largest / 448)),
    }
    return made[scheme]()


@cache
def quantized(family: str, scheme: str, sites: bool = False, group: int = GROUP) -> Path:
    """Writes a quantized checkpoint once for all tests, which leave it alone; random scales of smoothing."""
    config, auto = FAMILIES[family]
    torch.manual_seed(0)
    with quiet():
        model = auto.from_config(config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) if parameter.ndim > 1 else parameter + 0.2 * torch.randn_like(parameter))
    folder = Path(_SCRATCH.name) / f"{family}-{scheme}-{sites}-{group}"
    with quiet():
        model.save_pretrained(folder)
    return requantize(folder, scheme, inputs(family), sites, group)


def requantize(folder: Path, scheme: str, features: dict[str, Tensor], sites: bool = False, group: int = GROUP) -> Path:
    """Quantizes a float checkpoint in place, every linear layer of its blocks, with input scales of what these rows bring.

    Args:
        folder: The checkpoint.
        scheme: What `scales_of` knows.
        features: Rows.
        sites: Whether attention and residuals are int8 too.
        group: Inputs that share a scale in int4.
    """
    model = with_separate_experts(load(folder))
    ranges: dict[str, float] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: ranges.update({name: _largest(args[0])}))
        for name, layer in blocks_linears(model).items()
    ]
    with torch.no_grad():
        forward(model, features)
    for handle in handles:
        handle.remove()
    scales = {}
    for name, layer in blocks_linears(model).items():
        smooth = 0.5 + torch.rand(layer.in_features)
        scales[name] = scales_of(scheme, layer.weight.detach(), 2 * ranges.get(name, 1.0), smooth, group)
        layer.weight.data = scales[name].on_grid(layer.weight.detach())
    with quiet():
        model.save_pretrained(folder, state_dict=stock_state(model))
    save_quantization(folder, scales, {})
    if sites:
        third = torch.tensor(0.03)
        products = {f"{name}/{kind}": ProductScales(third, third) for name in attention_modules(model) for kind in ("qk", "pv")}
        outputs = [name for name in scales if name.endswith("output.dense")]
        save_sites(folder, Sites(products, {f"{name}/residual": torch.tensor(0.02) for name in outputs}))
    return folder


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 1.0


def answers(folder: Path, features: dict[str, Tensor]) -> Tensor:
    """Returns the logits of the undivided model."""
    with torch.inference_mode():
        return forward(load(folder), features)


def divided_answers(
    folder: Path, features: dict[str, Tensor], ranks: int, out: Path, placements: dict[str, Placement] | None = None
) -> list[Tensor]:
    """Divides a checkpoint; returns the logits that every rank has."""
    write(Checkpoint(folder), out, ranks, "export.tensor_parallel", placements)
    meeting = Meeting(ranks)
    models = [load_rank(folder_of(out, rank, ranks), meeting.of(rank)) for rank in range(ranks)]
    return meeting.together([lambda model=model: forward(model, features) for model in models])
