"""Principal components of the residual stream, and the weights of a model in their basis.

Readers of the stream see it normalized, x^ = norm(x), of each token. With the eigenvectors V of the mean of x^ x^^T over tokens and norms,
largest eigenvalue first, and k channels that are left of D:

    P [D, k] = V_k                    RMSNorm: the coordinates of the first k components
    P [D, k] = V_(k-1) H^T            LayerNorm: of the first k - 1 of the centred states; H [k, k - 1] is an orthonormal basis of the
                                      vectors whose entries add up to 0, so that x P has mean 0 and the norm of k channels need not centre

Norms are made neutral first: gain and bias move into the layers that read them. Then every weight with an axis over the stream gets
that axis in the new basis, and norms the gain sqrt(D / k), as they divide by a mean over k channels now:

    W_in -> W_in diag(g) P,   b -> b + W_in beta,   W_out -> P^T W_out,   b_out -> P^T b_out,   E -> E P

With k = D nothing is lost, and the outputs are the same; that is proved on rows, for each model. It holds where the stream is a sum that
norms read (pre-norm). Where norms lie on it (post-norm, as in BERT), their gains cannot move, and such models are refused.

PCA projection of the hidden width is SP3's (Hu et al. 2023, https://arxiv.org/abs/2308.16475). Gains folded into readers are SliceGPT's
(`foundation.models.architecture.residual`), here with the same basis in every layer, so that the small model has the shape of a stock
one. Left out: SP3's learned masks, a basis for each layer, models that tie embedding and head.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.architecture.residual import fold, norms_of, stream_of
from foundation.models.architecture.structure import Structure
from foundation.models.forward import device_of, forward
from foundation.models.tied import shared_names
from foundation.training.train import Batch
from prune.hook_points import token_masks

TOLERANCE = 1e-3
"""Largest difference of an output of the model in the basis of all components, relative to the largest output where that is above 1."""


@dataclass(frozen=True)
class Basis:
    """Principal components of the normalized residual stream."""

    components_DN: Tensor
    """V, float64, the largest component first: D of them, or D - 1 where norms centre."""
    variances_D: Tensor
    """Score of each channel of the new basis, float32, descending."""
    centred: bool
    """Whether norms centre."""

    def projection(self, width: int) -> Tensor:
        """Returns P, float64 `[D, width]`."""
        if not self.centred:
            return self.components_DN[:, :width]
        return self.components_DN[:, : width - 1] @ summing_to_zero(width).T


def summing_to_zero(size: int) -> Tensor:
    """Returns an orthonormal basis of the vectors of a size whose entries add up to 0, float64 `[size, size - 1]` (Helmert's)."""
    basis = torch.zeros(size, max(0, size - 1), dtype=torch.float64)
    for column in range(1, size):
        basis[:column, column - 1] = 1.0
        basis[column, column - 1] = -column
        basis[:, column - 1] /= (column * (column + 1)) ** 0.5
    return basis


def principal(model: nn.Module, structure: Structure, batches: Iterable[Batch], key: str) -> Basis:
    """Returns the principal components of what the norms over the residual stream read, of all tokens but padding.

    Args:
        model: In evaluation mode.
        structure: Its structure.
        batches: Calibration rows.
        key: Key path of the stage, for messages.

    Raises:
        InputError: The model has norms of both kinds, or none.
    """
    norms = [model.get_submodule(name) for name in norms_of(model, structure)]
    kinds = {isinstance(norm, nn.LayerNorm) for norm in norms}
    if len(kinds) != 1:
        raise InputError(f"{key}.granularity", "width given", "this model has no norms of one kind over its residual stream", "give hidden")
    centred, width = kinds == {True}, structure.sizes.hidden
    total_DD = torch.zeros(width, width, dtype=torch.float64)
    masks: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        x_ND = x[masks[0].to(x.device)] if x.shape[:-1] == masks[0].shape else x.reshape(-1, width)
        x_ND = x_ND.double().cpu()
        x_ND = x_ND - x_ND.mean(dim=1, keepdim=True) if centred else x_ND
        x_ND = x_ND / x_ND.square().mean(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny).sqrt()
        total_DD.add_(x_ND.T @ x_ND)

    with ExitStack() as stack, torch.no_grad():
        for norm in norms:
            stack.callback(norm.register_forward_pre_hook(keep).remove)
        for batch in batches:
            masks[:] = token_masks(model, structure, batch.features)
            model(**batch.features)
    space_DN = summing_to_zero(width) if centred else torch.eye(width, dtype=torch.float64)
    found = torch.linalg.eigh(space_DN.T @ total_DD @ space_DN)
    components_DN = space_DN @ found.eigenvectors.flip(1)
    variances_N = found.eigenvalues.flip(0).clamp(min=0)
    falling_D = torch.linspace(1, 0, width, dtype=torch.float64)  # so that channels without any variance keep their order
    variances_D = torch.nn.functional.pad(variances_N, (width - len(variances_N), 0), value=float(variances_N[0]))
    scale = float(variances_D[0]) or 1.0
    return Basis(components_DN, (variances_D / scale + 1e-6 * falling_D).float(), centred)


def project(model: nn.Module, structure: Structure, basis: Basis, width: int, features: Mapping[str, Tensor]) -> None:
    """Writes the weights in the basis of the first `width` components, in place; surgery must follow, which keeps the first channels.

    Args:
        model: A pre-norm model in evaluation mode.
        structure: Its structure.
        basis: The components.
        width: Channels that stay.
        features: A row or more, which show what reads each norm.
    """
    stream = stream_of(model, structure, lambda: forward(model, features))
    fold(model, stream)
    size = structure.sizes.hidden
    square_DD = torch.zeros(size, size, dtype=torch.float64)
    square_DD[:, :width] = basis.projection(width)
    parameters = dict(model.named_parameters())
    own = {f"{norm}.{part}" for norm in stream.norms for part in ("weight", "bias")}
    with torch.no_grad():
        for name, axis in sorted(structure.residual):
            if name in parameters and name not in own:
                weight = parameters[name]
                turned = torch.tensordot(weight.double().cpu(), square_DD, dims=([axis], [0])).movedim(-1, axis)
                weight.copy_(turned.to(weight))
        for norm, kind in stream.norms.items():
            parameters[f"{norm}.weight"].fill_((size / width) ** 0.5 - kind.offset)


def prove_width(model: nn.Module, structure: Structure, basis: Basis, features: Mapping[str, Tensor], key: str) -> None:
    """Checks on a few rows that the model in the basis of all components gives the same outputs.

    Raises:
        InputError: It does not: norms lie on the residual stream, or are followed by something that does not take their gains.
    """
    config: Any = model.config
    if any(any((name, 0) in structure.vocabulary for name in group) for group in shared_names(model)):
        why = f"this {config.model_type} ties its head to its embedding, and only one of them takes the gains of the last norm"
        raise InputError(f"{key}.granularity", "width given", why, "give hidden")
    few = {name: value[:2] for name, value in features.items()}
    turned = copy.deepcopy(model)
    project(turned, structure, basis, structure.sizes.hidden, few)
    with torch.no_grad():
        expected, found = forward(model, few), forward(turned.to(device_of(model)), few)
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
    if not difference <= TOLERANCE:
        why = f"the norms of a {config.model_type} lie on the residual stream, so their gains cannot move into the layers that read it"
        raise InputError(f"{key}.granularity", "width given", why, "give hidden")


def try_width(config: Any, key: str) -> None:
    """Raises if models of a config cannot be projected: tried on one with two layers and random weights.

    Raises:
        InputError: See `prove_width`.
    """
    from foundation.models.architecture.attention import probe
    from foundation.models.architecture.blocks import with_layers
    from foundation.models.architecture.shapes import on_meta, remade

    few = with_layers(config, range(min(2, config.num_hidden_layers)))
    tried = remade(on_meta(few), few).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in tried.parameters():  # gains differ from channel to channel, as they do after training
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    structure, features = Structure.of(tried, key), probe(tried, generator)
    width = structure.sizes.hidden
    space_DN = summing_to_zero(width)
    centred = all(isinstance(tried.get_submodule(name), nn.LayerNorm) for name in norms_of(tried, structure))
    basis = Basis(space_DN if centred else torch.eye(width, dtype=torch.float64), torch.ones(width), centred)
    prove_width(tried, structure, basis, features, key)
