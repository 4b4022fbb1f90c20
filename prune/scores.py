"""Scores: how important everything is that may be taken out of a model, by one of the methods.

    magnitude    the weights alone                                           `prune.magnitude`
    taylor       first-order change of the loss                              `prune.taylor`
    fisher       second-order change of the loss at a minimum                `prune.fisher`
    activation   what is said on real rows                                   `prune.activation`

taylor and fisher are in the unit of the loss, the same everywhere. magnitude and activation have a unit of their own in each layer and
are divided by their mean there. Blocks are ranked by the size of their weights with magnitude, else by how much they turn what goes
through. Heads and neurons that nobody reads, because zeros have emptied them (`prune.emptied`), score 0 by any method: they go first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compress.models.structure import Structure
from compress.training.train import Batch, Objective
from prune.activation import activation, turning
from prune.cost import Component, count_of
from prune.fisher import fisher
from prune.gates import Where, gated
from prune.magnitude import magnitude
from prune.places import Places, token_mask
from prune.selection import COMPONENTS, Scores
from prune.slices import channel_slices, component_slices
from prune.taylor import taylor

Method = Literal["magnitude", "taylor", "fisher", "activation"]
RELATIVE: tuple[Method, ...] = ("magnitude", "activation")
"""Methods whose scores have a unit of their own in each layer."""
Batches = Callable[[], Iterable[Batch]]
"""Starts a pass over the calibration rows."""


def scores_of(method: Method, model: nn.Module, structure: Structure, batches: Batches, objective: Objective, hidden: bool) -> Scores:
    """Returns the scores of a model.

    Args:
        method: How importance is measured.
        model: The model, in evaluation mode; left as it is.
        structure: Its structure.
        batches: Gives calibration rows; not asked by magnitude.
        objective: The loss of a batch, for taylor and fisher.
        hidden: Whether channels of the residual stream are scored.
    """
    if method == "magnitude":
        return unread_first(comparable(by_magnitude(model, structure)), model, structure)
    said = by_activation(model, structure, batches)
    if method == "activation":
        return unread_first(comparable(said), model, structure)
    found = by_gradient(taylor if method == "taylor" else fisher, model, structure, batches, objective, hidden)
    components = {where: score for where, score in found.items() if isinstance(where, tuple)}
    return unread_first(Scores(components, said.layers, found["hidden"] if hidden else said.hidden), model, structure)


def by_magnitude(model: nn.Module, structure: Structure) -> Scores:
    """Returns the scores of a model by the size of its weights; of channels as shares of every weight, so that no large one decides."""
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    blocks = range(structure.depth)
    return Scores(
        {
            (block, what): magnitude(component_slices(structure, weights, block, what))
            for block in blocks
            for what in COMPONENTS
            if count_of(structure.sizes, block, what)
        },
        torch.cat([magnitude(_of_block(weights, f"{structure.prefix}.{block}.")) for block in blocks]),
        magnitude([slice_Dn / slice_Dn.float().norm().clamp(min=1e-30) for slice_Dn in channel_slices(structure, weights)]),
    )


def by_gradient(
    score: Callable[[Tensor], Tensor], model: nn.Module, structure: Structure, batches: Batches, objective: Objective, hidden: bool
) -> dict[Where, Tensor]:
    """Returns the mean over all rows of a score of gradients of gates, float32 `[n]` each."""
    sums: dict[Where, Tensor] = {}
    rows = 0
    with gated(model, structure, hidden) as start:
        for batch in batches():
            size = len(batch.indices)
            gates = start(size)
            loss_b = torch.stack(list(objective(model, batch).values())).sum(dim=0)
            for where, gradient in gates.gradients(loss_b).items():
                sums[where] = sums.get(where, torch.zeros(())) + size * score(gradient).cpu()
            rows += size
    return {where: total / rows for where, total in sums.items()}


def by_activation(model: nn.Module, structure: Structure, batches: Batches) -> Scores:
    """Returns the scores of a model by what is said in it, in one pass over the rows."""
    seen = _Seen(model, structure)
    with torch.inference_mode():
        for batch in batches():
            seen.mask_bL = token_mask(batch.features, structure.attentions[0].tokens)
            model(**batch.features)
    seen.remove()
    roots = {where: seen.mean(where).sqrt().float() for where in seen.sums}
    components = {where: score for where, score in roots.items() if isinstance(where, tuple) and where[1] != "layer"}
    layers = torch.stack([seen.mean((block, "layer")).float() for block in range(structure.depth)])
    norms = [score for where, score in roots.items() if isinstance(where, str)]
    return Scores(components, layers, torch.stack(norms).sum(dim=0) if norms else torch.zeros(0))


def comparable(scores: Scores) -> Scores:
    """Returns scores whose mean is 1 in every component: what makes those comparable that have a unit of their own in each layer."""
    divided = {part: score / score.mean().clamp(min=torch.finfo(score.dtype).tiny) for part, score in scores.components.items()}
    return Scores(divided, scores.layers, scores.hidden)


def unread_first(scores: Scores, model: nn.Module, structure: Structure) -> Scores:
    """Returns the scores with 0 for every group of heads and every neuron whose columns in the layer that reads it are all 0."""
    places, components = Places.of(model, structure), dict(scores.components)
    for block in range(structure.depth):
        whats: tuple[tuple[Component, str | None], ...] = (("heads", places.heads[block]), ("ffn", places.ffn[block]))
        for what, reader in whats:
            if reader is not None and (block, what) in components:
                weight_OI: Tensor = model.get_submodule(reader).weight.detach()  # type: ignore[operator]
                score_S = components[block, what]
                read_S = (weight_OI != 0).any(dim=0).reshape(len(score_S), -1).any(dim=1)
                components[block, what] = score_S * read_S.to(score_S.device)
    return replace(scores, components=components)


class _Seen:
    """Adds up what flows through the places of a model."""

    def __init__(self, model: nn.Module, structure: Structure) -> None:
        self.sums: dict[Any, Tensor] = {}
        self.tokens: dict[Any, int] = {}
        self.mask_bL = torch.zeros(0, 0, dtype=torch.bool)
        places, sizes = Places.of(model, structure), structure.sizes
        self.handles = []
        for block in range(structure.depth):
            self._before(model, places.heads[block], (block, "heads"), sizes.key_value_heads[block])
            if places.ffn[block] is not None:
                self._before(model, str(places.ffn[block]), (block, "ffn"), sizes.ffn[block])
            if places.experts[block] is not None:
                module = model.get_submodule(str(places.experts[block]))
                self.handles.append(module.register_forward_pre_hook(self._experts(block, sizes.experts[block])))
            module = model.get_submodule(places.blocks[block])
            self.handles.append(module.register_forward_hook(self._block(block), with_kwargs=True))
        for norm in places.norms:
            self.handles.append(model.get_submodule(norm).register_forward_hook(self._norm(norm)))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def mean(self, where: Any) -> Tensor:
        return self.sums[where] / self.tokens[where]

    def add(self, where: Any, mean: Tensor, tokens: int) -> None:
        self.sums[where] = self.sums.get(where, torch.zeros((), dtype=torch.float64)) + tokens * mean.cpu()
        self.tokens[where] = self.tokens.get(where, 0) + tokens

    def kept(self, x_bLD: Tensor) -> Tensor:
        """Returns the tokens that are no padding, `[N, D]`."""
        return x_bLD.reshape(*self.mask_bL.shape, -1)[self.mask_bL.to(x_bLD.device)]

    def _before(self, model: nn.Module, name: str, where: tuple[int, Component], number: int) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x_ND = self.kept(args[0])
            self.add(where, activation(x_ND.reshape(len(x_ND), number, -1)), len(x_ND))

        self.handles.append(model.get_submodule(name).register_forward_pre_hook(hook))

    def _norm(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.dim() > 2:  # that of a pooled row has no tokens
                x_ND = self.kept(output)
                self.add(name, activation(x_ND[:, :, None]), len(x_ND))

        return hook

    def _block(self, block: int) -> Callable[[nn.Module, Any, Mapping[str, Any], Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            made = output[0] if isinstance(output, tuple) else output
            x_ND = self.kept(given)
            self.add((block, "layer"), turning(x_ND, self.kept(made)), len(x_ND))

        return hook

    def _experts(self, block: int, number: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Asks each expert alone for what it adds to the tokens that it gets."""

        def hook(module: Any, args: tuple[Any, ...]) -> None:
            states_ND, chosen_Nk, weights_Nk = args[:3]
            kept_N = self.mask_bL.flatten().to(states_ND.device)
            squares_E = torch.zeros(number, dtype=torch.float64)
            for expert in range(number):
                token, place = (kept_N[:, None] & (chosen_Nk == expert)).nonzero(as_tuple=True)
                if len(token):
                    alone, weight = torch.full_like(token, expert)[:, None], weights_Nk[token, place, None]
                    said_ND = type(module).forward(module, states_ND[token], alone, weight)  # past this hook
                    squares_E[expert] = said_ND.double().square().sum().cpu()
            tokens = int(kept_N.sum())
            self.add((block, "experts"), squares_E / tokens, tokens)

        return hook


def _of_block(weights: Mapping[str, Tensor], prefix: str) -> list[Tensor]:
    return [value.reshape(1, -1) for name, value in weights.items() if name.startswith(prefix)]
