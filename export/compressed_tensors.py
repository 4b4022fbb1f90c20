"""A quantized text model in the format `compressed-tensors`: packed codes that Transformers, vLLM and SGLang load.

    scheme         format           weight                                   activations
    w4a16          pack-quantized   `weight_packed` int32, 8 codes each      float
    w8a16          pack-quantized   `weight_packed` int32, 4 codes each      float
    w8a8           int-quantized    `weight` int8                            `input_scale`, static
    w8a8-dynamic   int-quantized    `weight` int8                            a scale for each token, at run time
    fp8            float-quantized  `weight` float8_e4m3fn                   `input_scale`, static

with `weight_scale` float32 [O, 1], or [O, G] for groups; with zero points `weight_zero_point` int32 [O / 8, G], 8 outputs each. The codes
are exactly the checkpoint's; every other tensor is copied as it is, file by file, so that a model needs no more memory than its
largest file. config.json says what is what (`quantization_config`).

Transformers 5.23 with compressed-tensors 0.20 loads zero points only with `CompressedTensorsConfig(dequantize=True)`, into float weights:
otherwise it expects them unpacked, and refuses what the package itself writes.

Those programs multiply the same numbers with one exception: their int8 scale of a token is max |x| / 127.5 where ours is max |x| / 127.

Those programs quantize every Linear that `ignore` does not name. It names each layer of the stock model that has no scales here: heads, and
poolers that a checkpoint of a body has no weights for.

Left out: what the format has no word for (`obstacle`): smoothing vectors, int8 attention and residuals, groups of unequal width,
int8 activations in blocks, Conv1D.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from foundation.artifacts.artifact import write_json
from foundation.models.folder import Checkpoint
from foundation.models.library import quiet, stock_auto, task_of
from foundation.models.meta import on_meta_device
from foundation.models.own_shape import SHAPE_KEY
from foundation.schemes.checkpoint import QUANTIZATION_JSON, QUANTIZATION_TENSORS, load_quantization
from foundation.schemes.fp8 import Fp8Scales, to_e4m3
from foundation.schemes.int4 import Int4Scales
from foundation.schemes.int4_by_int8 import BlockScales
from foundation.schemes.int8 import DynamicScales, LayerScales, levels, quantize
from foundation.schemes.int8_weights import WeightScales
from foundation.schemes.scales import Scales
from foundation.schemes.table import SCHEMES

INDEX = "model.safetensors.index.json"
NOT_COPIED = frozenset({QUANTIZATION_JSON, QUANTIZATION_TENSORS, INDEX, "config.json", "manifest.json"})
HELD = (LayerScales, DynamicScales, WeightScales, Int4Scales, Fp8Scales)
"""Kinds of scales that `_weight` converts."""


def is_decoder(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint generates text."""
    config = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    names = config.get("architectures")  # null where none is known
    return names is not None and any("ForCausalLM" in name or "LMHead" in name for name in names)


def obstacle(checkpoint: Checkpoint) -> str | None:
    """Returns in one line why the format cannot hold a quantized text model; None where it can."""
    layers, _ = load_quantization(checkpoint.folder)
    document = json.loads((checkpoint.folder / QUANTIZATION_JSON).read_text(encoding="utf-8"))
    if any(document.get(sites) for sites in ("products", "residuals")):
        return "it has no word for int8 attention and residuals; quantize with attention: false and residual: false"
    if SHAPE_KEY in json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8")):
        return "its layers differ in size or read a learned prefix, and only compress.api.load_checkpoint builds such a shape"
    modules, stored = _modules(checkpoint), _stored(checkpoint)
    for name, scales in layers.items():
        if not isinstance(scales, HELD) or isinstance(scales, BlockScales):
            return f"it has no word for the scheme {scales.SCHEME}"
        if name not in modules:
            return f"{name} is one of several experts that Transformers keeps in one tensor, and only Linear is held"
        if not isinstance(modules[name], nn.Linear):
            return f"{name} is {type(modules[name]).__name__} in Transformers, and only Linear is held"
        if f"{name}.weight" not in stored:
            return f"{name} has another name in the files of the checkpoint"
        if isinstance(scales, LayerScales | DynamicScales) and scales.input_smooth is not None:
            return f"{name} has a smoothing vector; quantize with smoothquant: {{prescale: false}}"
        if isinstance(scales, Int4Scales) and scales.weight_offset is not None:
            return f"{name} has real offsets in place of zero points; quantize with group_scales: two_level"
        if isinstance(scales, Int4Scales) and modules[name].in_features % scales.group_size:
            return (
                f"{name} has {modules[name].in_features} inputs, no multiple of group_size {scales.group_size}; give one that divides them"
            )
    return None


def write(checkpoint: Checkpoint, out: Path) -> None:
    """Writes the folder.

    Args:
        checkpoint: A quantized text model without `obstacle`.
        out: Folder to write: empty, or made with its parents.
    """
    assert obstacle(checkpoint) is None, obstacle(checkpoint)
    layers, listed = load_quantization(checkpoint.folder)
    floating = [*listed, *(name for name in _linears(checkpoint) if name not in layers and name not in listed)]
    out.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for file in sorted(checkpoint.folder.glob("model*.safetensors")):
        tensors = converted(load_file(file), layers)
        save_file(tensors, out / file.name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file.name)
    if (checkpoint.folder / INDEX).exists():
        size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        write_json(out / INDEX, {"metadata": {"total_size": size}, "weight_map": places})
    config = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    write_json(out / "config.json", {**config, "quantization_config": described(layers, floating, str(checkpoint.scheme))})
    for file in checkpoint.folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in NOT_COPIED:
            shutil.copyfile(file, out / file.name)


def converted(tensors: Mapping[str, Tensor], layers: Mapping[str, Scales]) -> dict[str, Tensor]:
    """Returns the tensors of one file, with quantized layers in the format; a bias stays what it is."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, parameter = name.rpartition(".")
        if parameter == "weight" and layer in layers:
            found |= {f"{layer}.{key}": value for key, value in _weight(tensor.float(), layers[layer]).items()}
        else:
            found[name] = tensor
    return found


def described(layers: Mapping[str, Scales], floating: list[str], scheme: str) -> dict[str, object]:
    """Returns the `quantization_config` of config.json.

    Args:
        layers: The quantized layers.
        floating: Names of the linear layers that stay float.
        scheme: The scheme.
    """
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    row = SCHEMES[scheme]
    kind = {"num_bits": row.weight_bits, "type": "int" if row.integer else "float", "symmetric": True}
    weights = {**kind, "strategy": "channel"}
    form = "pack-quantized" if row.activations == "float" else "int-quantized" if row.integer else "float-quantized"
    inputs = {
        "static": {**kind, "strategy": "tensor", "dynamic": False},
        "dynamic": {**kind, "strategy": "token", "dynamic": True},
        "float": None,
    }[row.activations]
    if row.grouped:
        (shape,) = {(scales.group_size, scales.symmetric) for scales in layers.values() if isinstance(scales, Int4Scales)}
        weights = {**kind, "strategy": "group", "group_size": shape[0], "symmetric": shape[1]}
    group = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=None if inputs is None else QuantizationArgs(**inputs)
    )
    config = QuantizationConfig(config_groups={"group_0": group}, format=form, quantization_status="compressed", ignore=floating)
    document: dict[str, object] = json.loads(config.model_dump_json())
    return document


def _weight(weight_OI: Tensor, scales: Scales) -> dict[str, Tensor]:
    """Returns the tensors of one layer by name: codes, scale and zero points of the weight, scale of the input."""
    match scales:
        case Int4Scales():
            from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

            shape, zero_OG = torch.tensor(weight_OI.shape, dtype=torch.int64), scales.weight_zero_point
            zero_points = {} if zero_OG is None else {"weight_zero_point": pack_to_int32(zero_OG, 4, packed_dim=0)}
            packed = pack_to_int32(scales.codes(weight_OI), 4)
            return {"weight_packed": packed, "weight_scale": scales.weight_scale, "weight_shape": shape, **zero_points}
        case WeightScales():
            from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

            shape, scale_O1 = torch.tensor(weight_OI.shape, dtype=torch.int64), scales.weight_scale[:, None].contiguous()
            return {"weight_packed": pack_to_int32(scales.codes(weight_OI), 8), "weight_scale": scale_O1, "weight_shape": shape}
        case LayerScales() | DynamicScales():
            largest, scale_O1 = levels(scales.weight_bits), scales.weight_scale[:, None]
            found = {"weight": quantize(weight_OI, scale_O1, -largest, largest), "weight_scale": scale_O1.contiguous()}
            return found | ({"input_scale": scales.input_scale.reshape(1)} if isinstance(scales, LayerScales) else {})
        case Fp8Scales():
            scale_O1 = scales.weight_scale[:, None].contiguous()
            return {"weight": to_e4m3(weight_OI, scale_O1), "weight_scale": scale_O1, "input_scale": scales.input_scale.reshape(1)}
    raise TypeError(f"no such scales: {type(scales).__name__}")


def _stored(checkpoint: Checkpoint) -> set[str]:
    """Returns the names of all tensors of a checkpoint."""
    found: set[str] = set()
    for file in checkpoint.folder.glob("model*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= set(tensors.offset_keys())
    return found


def _linears(checkpoint: Checkpoint) -> list[str]:
    """Returns the names of the linear layers of the stock model."""
    return [name for name, module in _modules(checkpoint).items() if isinstance(module, nn.Linear)]


def _modules(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the modules of the stock model by name, without weights."""
    with on_meta_device(), quiet():
        config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
        auto = AutoModelForCausalLM if is_decoder(checkpoint) else stock_auto(task_of(config))
        return dict(auto.from_config(config).named_modules())
