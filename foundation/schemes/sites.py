"""Sites: the int8 operations of a w8a8 model other than its linear layers, how they are added to a model, and how they are stored.

    <attention module>/qk    scores = Q K^T                        scales of Q and K          `foundation.schemes.attention_products`
    <attention module>/pv    output = P V                          scales of P and V          `foundation.schemes.attention_products`
    <layer>/residual         output of the layer + residual        scale of the residual      `foundation.schemes.residual`

Each site is computed by a child module added to the attention module or the layer. Children take and return plain tensors, so calibration
can put observers in exactly the same places. Their scales are non-persistent buffers, which are not saved with the model.

A checkpoint lists its sites in `quantization.json` under `products` and `residuals`. `quantization.safetensors` holds `<site>.left_scale`
and `<site>.right_scale` for a product and `<site>.scale` for a residual, each float32 [].

Not supported: quantization-aware training of sites. QAT trains the linear layers; sites are calibrated afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from foundation.artifacts.artifact import write_json
from foundation.core.errors import InputError
from foundation.schemes.attention_products import ATTENTION, Int8Attention, ProductScales, attention_modules, configs, use
from foundation.schemes.checkpoint import QUANTIZATION_JSON, QUANTIZATION_TENSORS, load_quantization, unusable
from foundation.schemes.residual import RESIDUAL, Int8Residual, mark
from foundation.schemes.scales import positive

KINDS = {"products": ("/qk", "/pv"), "residuals": ("/residual",)}
"""Suffixes of site names, by their key in quantization.json."""


@dataclass(frozen=True)
class Sites:
    """All sites of a model with their scales."""

    products: Mapping[str, ProductScales] = field(default_factory=dict)
    """Scales by site name, `<attention module>/qk` or `<attention module>/pv`."""
    residuals: Mapping[str, Tensor] = field(default_factory=dict)
    """Scale, float32 [], by site name, `<layer>/residual`."""

    @property
    def names(self) -> list[str]:
        """Names of all sites: products, then residuals."""
        return [*self.products, *self.residuals]

    def only(self, names: Collection[str]) -> Sites:
        """Returns the sites with these names."""
        products = {name: scales for name, scales in self.products.items() if name in names}
        return Sites(products, {name: scale for name, scale in self.residuals.items() if name in names})

    def forms(self) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
        """Returns the child modules that compute the sites: for attention modules, and for layers."""
        modules = dict.fromkeys(owner(name) for name in self.products)
        attention = {name: Int8Attention(name, self.products.get(f"{name}/qk"), self.products.get(f"{name}/pv")) for name in modules}
        return dict(attention), {owner(name): Int8Residual(name, scale) for name, scale in self.residuals.items()}


def owner(site: str) -> str:
    """Returns the attention module or the layer that a site belongs to."""
    return site.rpartition("/")[0]


def put(model: nn.Module, attention: Mapping[str, nn.Module], residuals: Mapping[str, nn.Module]) -> list[RemovableHandle]:
    """Adds child modules that compute attention and residuals, in place.

    Args:
        model: The model.
        attention: By name of the attention module: takes query, key, value, mask and scaling, and returns the same as
            `foundation.schemes.attention_products.attend`.
        residuals: By name of the layer: takes the tensor that is added to the output of the layer, and returns the tensor to add instead.

    Returns:
        The handles of the hooks.
    """
    if attention:
        use(model)
    for names, child in ((attention, ATTENTION), (residuals, RESIDUAL)):
        for name, form in names.items():
            model.get_submodule(name).add_module(child, form)
    return [model.get_submodule(name).register_forward_hook(mark) for name in residuals]


@contextmanager
def placed(model: nn.Module, attention: Mapping[str, nn.Module], residuals: Mapping[str, nn.Module]) -> Iterator[None]:
    """Like `put`, but undone at the end of the block; layers must not be replaced inside the block."""
    before = [(config, config._attn_implementation) for config in configs(model)]
    handles = put(model, attention, residuals)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for names, child in ((attention, ATTENTION), (residuals, RESIDUAL)):
            for name in names:
                delattr(model.get_submodule(name), child)
        for config, implementation in before:
            config._attn_implementation = implementation


def save_sites(folder: Path, sites: Sites) -> None:
    """Adds sites to the files that `foundation.schemes.checkpoint.save_quantization` wrote."""
    document = json.loads((folder / QUANTIZATION_JSON).read_text(encoding="utf-8"))
    tensors = load_file(folder / QUANTIZATION_TENSORS)
    for name, scales in sites.products.items():
        tensors |= {f"{name}.left_scale": scales.left.clone(), f"{name}.right_scale": scales.right.clone()}
    tensors |= {f"{name}.scale": scale.clone() for name, scale in sites.residuals.items()}
    save_file(tensors, folder / QUANTIZATION_TENSORS)
    write_json(folder / QUANTIZATION_JSON, document | {"products": list(sites.products), "residuals": list(sites.residuals)})


def load_sites(folder: Path) -> Sites:
    """Returns the sites of a quantized checkpoint, which may be empty.

    Raises:
        InputError: A file is missing or damaged, or a scale is not a positive number.
    """
    try:
        document = json.loads((folder / QUANTIZATION_JSON).read_text(encoding="utf-8"))
        tensors = load_file(folder / QUANTIZATION_TENSORS)
        listed = {key: list(document.get(key, [])) for key in KINDS}
        wrong = [name for key, ends in KINDS.items() for name in listed[key] if not name.endswith(ends)]
        if wrong:
            raise ValueError(f"{wrong[0]} is not the name of a site")
        sites = Sites(
            {name: ProductScales(tensors[f"{name}.left_scale"], tensors[f"{name}.right_scale"]) for name in listed["products"]},
            {name: tensors[f"{name}.scale"] for name in listed["residuals"]},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise unusable(folder, error) from error
    given = {name: [scales.left, scales.right] for name, scales in sites.products.items()}
    for name, scales in (given | {name: [scale] for name, scale in sites.residuals.items()}).items():
        if not all(scale.shape == () and positive(scale) for scale in scales):
            raise InputError(f"{folder}", f"{name}: its scales must be positive numbers, one for each tensor", remedy="quantize again")
    return sites


def apply_sites(model: nn.Module, folder: Path) -> None:
    """Adds the sites of a quantized checkpoint to a model that already has its quantized layers, in place.

    Raises:
        InputError: Files are damaged, or name modules that the model does not have.
    """
    attention, residuals = load_sites(folder).forms()
    modules = attention_modules(model) if attention else {}
    layers = load_quantization(folder)[0] if residuals else {}
    for names, allowed, what in ((attention, modules, "an attention module"), (residuals, layers, "a quantized layer")):
        for name in names:
            if name not in allowed:
                raise InputError(
                    f"{folder}", f"{QUANTIZATION_JSON} names {name}, which is not {what} of the model", remedy="quantize again"
                )
    put(model, attention, residuals)
