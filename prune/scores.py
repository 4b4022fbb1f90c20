"""Scores: importance of every prunable unit of a model.

    magnitude    weight norm                                                 `prune.magnitude`
    taylor       first-order change of the loss                              `prune.taylor`
    fisher       second-order change of the loss at a minimum                `prune.fisher`
    activation   activation magnitude on calibration rows                    `prune.activation`

taylor and fisher are in the unit of the loss, comparable everywhere. magnitude and activation are comparable within a layer only, so they
are divided by their mean in each layer. Blocks are ranked by weight norm for magnitude, else by block influence; on request by the loss
without them (`prune.layer_loss`). Heads and neurons that no nonzero weight reads (`prune.emptied`) score 0 with any method: they are pruned
first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from prune.cost import GATED, Component, count_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foundation.models.architecture.blocks import Output
    from foundation.models.architecture.structure import Structure
    from foundation.training.train import Batch, Objective
    from prune.gates import GateSite
    from prune.selection import Scores

Batches = Callable[[], "Iterable[Batch]"]
"""Starts a new pass over the calibration rows."""


def by_magnitude(model: nn.Module, structure: Structure) -> Scores:
    """Returns the scores by weight norm; for channels each weight is normalized first, so that no large weight dominates."""
    import torch

    from prune.magnitude import magnitude
    from prune.selection import COMPONENTS, Scores
    from prune.slices import channel_slices, component_slices

    weights = {name: value.detach() for name, value in model.state_dict().items()}
    blocks = range(structure.depth)
    return Scores(
        {
            (block, what): magnitude(component_slices(structure, weights, block, what))
            for block in blocks
            for what in COMPONENTS
            if count_of(structure.sizes, block, what)
        },
        torch.cat([magnitude(_of_block(weights, f"{name}.")) for name in structure.blocks]),
        magnitude([slice_Dn / slice_Dn.float().norm().clamp(min=1e-30) for slice_Dn in channel_slices(structure, weights)]),
    )


def by_gradient(
    score: Callable[[Tensor], Tensor], model: nn.Module, structure: Structure, batches: Batches, objective: Objective, hidden: bool
) -> dict[GateSite, Tensor]:
    """Returns the mean over all rows of a score that is computed from gate gradients, float32 `[n]` each."""
    import torch

    from prune.gates import gated

    sums: dict[GateSite, Tensor] = {}
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
    """Returns the scores by activation magnitude, in one pass over the rows."""
    import torch

    from prune.hook_points import token_masks
    from prune.selection import Scores

    seen = _ActivationSums(model, structure)
    with torch.no_grad():
        for batch in batches():
            seen.masks = token_masks(model, structure, batch.features)
            model(**batch.features)
    seen.remove()
    roots = {where: seen.mean(where).sqrt().float() for where in seen.sums}
    components = {where: score for where, score in roots.items() if isinstance(where, tuple) and where[1] != "layer"}
    layers = torch.stack([seen.mean((block, "layer")).float() for block in range(structure.depth)])
    norms = [score for where, score in roots.items() if isinstance(where, str)]
    return Scores(
        cast("dict[tuple[int, Component], Tensor]", components), layers, torch.stack(norms).sum(dim=0) if norms else torch.zeros(0)
    )


def comparable(scores: Scores) -> Scores:
    """Returns the scores divided by their mean in every component, which makes them comparable between layers."""
    import torch

    from prune.selection import Scores

    divided = {part: score / score.mean().clamp(min=torch.finfo(score.dtype).tiny) for part, score in scores.components.items()}
    return Scores(divided, scores.layers, scores.hidden)


def unread_first(scores: Scores, model: nn.Module, structure: Structure) -> Scores:
    """Returns the scores with 0 for every head group and neuron that only zero weights read."""
    from prune.hook_points import HookPoints

    hooks, components = HookPoints.of(model, structure), dict(scores.components)
    for block in range(structure.depth):
        for what in GATED:
            reader = hooks.at(block, what)
            if reader is not None and (block, what) in components:
                weight_OI: Tensor = model.get_submodule(reader).weight.detach()  # type: ignore[operator]
                score_S = components[block, what]
                read_S = (weight_OI != 0).any(dim=0).reshape(len(score_S), -1).any(dim=1)
                components[block, what] = score_S * read_S.to(score_S.device)
    return replace(scores, components=components)


Where = tuple[int, str] | str
"""What activations belong to: a component of a block, or a norm."""


class _ActivationSums:
    """Accumulates the activations at the hook points of a model."""

    def __init__(self, model: nn.Module, structure: Structure) -> None:
        from torch import Tensor

        from prune.hook_points import HookPoints

        self.sums: dict[Where, Tensor] = {}
        self.tokens: dict[Where, int] = {}
        self.structure, self.masks = structure, list[Tensor]()
        hooks, sizes = HookPoints.of(model, structure), structure.sizes
        self.handles = []
        for block in range(structure.depth):
            for what in GATED:
                reader = hooks.at(block, what)
                if reader is not None:
                    self._before(model, reader, (block, what), count_of(sizes, block, what))
            if hooks.experts[block] is not None:
                module = model.get_submodule(str(hooks.experts[block]))
                self.handles.append(module.register_forward_pre_hook(self._experts(block, sizes.experts[block])))
            module = model.get_submodule(hooks.blocks[block])
            self.handles.append(module.register_forward_hook(self._block(block, hooks.blocks[block]), with_kwargs=True))
        for norm in hooks.norms:
            self.handles.append(model.get_submodule(norm).register_forward_hook(self._norm(norm)))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def mean(self, where: Where) -> Tensor:
        return self.sums[where] / self.tokens[where]

    def add(self, where: Where, mean: Tensor, tokens: int) -> None:
        import torch

        self.sums[where] = self.sums.get(where, torch.zeros((), dtype=torch.float64)) + tokens * mean.cpu()
        self.tokens[where] = self.tokens.get(where, 0) + tokens

    def valid_tokens(self, x_bLD: Tensor, name: str) -> Tensor:
        """Returns the tokens that are not padding, `[N, D]`, of what a module of this name reads or writes."""
        mask_bL = self.masks[self.structure.stack_of(name)]
        return x_bLD.reshape(*mask_bL.shape, -1)[mask_bL.to(x_bLD.device)]

    def _before(self, model: nn.Module, name: str, where: tuple[int, Component], number: int) -> None:
        from prune.activation import activation

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x_ND = self.valid_tokens(args[0], name)
            self.add(where, activation(x_ND.reshape(len(x_ND), number, -1)), len(x_ND))

        self.handles.append(model.get_submodule(name).register_forward_pre_hook(hook))

    def _norm(self, name: str) -> Callable[[nn.Module, object, Tensor], None]:
        from prune.activation import activation

        def hook(module: nn.Module, args: object, output: Tensor) -> None:
            if output.dim() > 2:  # the output for a pooled row has no token axis
                x_ND = self.valid_tokens(output, name)
                self.add(name, activation(x_ND[:, :, None]), len(x_ND))

        return hook

    def _block(self, block: int, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Mapping[str, Tensor], Output], None]:
        from prune.activation import block_influence

        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], output: Output) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            made = output[0] if isinstance(output, tuple) else output
            x_ND = self.valid_tokens(given, name)
            self.add((block, "layer"), block_influence(x_ND, self.valid_tokens(made, name)), len(x_ND))

        return hook

    def _experts(self, block: int, number: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        """Runs each expert alone on the tokens routed to it, to measure its contribution."""
        import torch

        from foundation.models.layers.listed_experts import alone_squares, is_listed

        stack = self.structure.stack_of(self.structure.blocks[block])

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            states_ND, chosen_Nk, weights_Nk = args[:3]
            kept_N = self.masks[stack].flatten().to(states_ND.device)
            tokens = int(kept_N.sum())
            if is_listed(module):
                self.add(
                    (block, "experts"), alone_squares(module, states_ND[kept_N], chosen_Nk[kept_N], weights_Nk[kept_N]) / tokens, tokens
                )
                return
            squares_E = torch.zeros(number, dtype=torch.float64)
            for expert in range(number):
                token, place = (kept_N[:, None] & (chosen_Nk == expert)).nonzero(as_tuple=True)
                if len(token):
                    alone, weight = torch.full_like(token, expert)[:, None], weights_Nk[token, place, None]
                    output_ND = type(module).forward(module, states_ND[token], alone, weight)  # bypasses this hook
                    squares_E[expert] = output_ND.double().square().sum().cpu()
            self.add((block, "experts"), squares_E / tokens, tokens)

        return hook


def _of_block(weights: Mapping[str, Tensor], prefix: str) -> list[Tensor]:
    return [value.reshape(1, -1) for name, value in weights.items() if name.startswith(prefix)]
