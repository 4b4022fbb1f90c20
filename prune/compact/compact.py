"""The stage `compact`: removes, without training, what the zeros of `sparsify` have disconnected; the outputs stay the same.

    heads, neurons that nothing reads             removed by the surgery of `prune`
    heads, neurons whose value is a constant      added to the bias of the layer that reads them, then removed
    FFN neurons that stay                         reordered, so that rows and columns with zeros in the same places lie side by side

What is left is an ordinary smaller model, which every later stage takes, and which every engine runs faster. Zeros inside the matrices that
remain are multiplied like other numbers.

That the outputs are the same is checked on training rows, each time: some architectures mix heads in ways that no surgery follows. Several
processes do not help; the first one does it all.

Not supported: channels of the residual stream, whose every value the norms read; whole blocks; experts.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.stage.stage import ModelStage

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

    from foundation.data.splits import Data
    from foundation.models.architecture.structure import Structure
    from foundation.models.size import Passes
    from foundation.stage.context import Context

TOLERANCE = 1e-4
"""Largest difference of an output, relative to the largest output where that is above 1, that float32 sums in another order may make."""


class Compact(ModelStage):
    """Removes heads and neurons that zeros have disconnected, without training; the outputs stay the same."""

    NAME: ClassVar[str] = "compact"

    rows: Annotated[int, Field(ge=1, le=4096)] = 32
    """Training rows on which constants are read off and the outputs are compared."""

    def work(self, passes: Passes, data: Data) -> float:
        """A pass before and a pass after over a few rows."""
        return float(passes.before + passes.after) * min(self.rows, len(data.train))

    def check(self, config: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context) -> None:
        """Checks before the first stage runs whether the heads and neurons of this model can be found.

        Raises:
            InputError: They cannot.
        """
        from foundation.models.architecture.shapes import on_meta
        from foundation.models.architecture.structure import Structure

        Structure.of(on_meta(config), self.key)

    def config_after(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The expected config without the slices that `sparsify` is expected to zero."""
        from prune.compact.forecast import compacted

        return compacted(config, self.key)

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, object]:
        """Writes the compacted checkpoint.

        Returns:
            `unread` and `constant` (numbers of `heads`, in groups that share keys and values, and `neurons` disconnected for either
            reason); `before` and `after` (sizes); `zeros` (share of zeros in the linear layers of the blocks, before and after);
            `parameters` (before and after); `difference`
            (largest absolute difference of an output on `rows` training rows); `seconds` (of the compaction, without loading and saving).

        Raises:
            InputError: The outputs would change.
        """
        from foundation.models.architecture.structure import Structure
        from foundation.models.checkpoint import load, save

        model = load(parent.path)
        structure = Structure.of(model, self.key)
        features = self._features(model, parent.path, context)
        zeros, parameters = _share_of_zeros(model), _parameters(model)
        expected = _logits(model, features)
        began = time.perf_counter()
        small, removed = self._compacted(model, structure, features[0])
        seconds = time.perf_counter() - began
        difference = self._difference(expected, _logits(small, features))
        after, left = _share_of_zeros(small), _parameters(small)
        last = Structure.of(small, self.key).sizes
        heads = sum(structure.sizes.heads) + sum(structure.sizes.cross) - sum(last.heads) - sum(last.cross)
        neurons = sum(structure.sizes.ffn) - sum(last.ffn)
        told = f"{heads} heads and {neurons} neurons removed: {left:,} of {parameters:,} parameters, {after:.1%} zeros after {zeros:.1%}"
        context.progress.log(f"  {told}; outputs differ by {difference:.1e} at most")
        save(small, parent.path, out, f"Compacted: {told}")
        return {
            **removed,
            "before": asdict(structure.sizes),
            "after": asdict(last),
            "zeros": {"before": zeros, "after": after},
            "parameters": {"before": parameters, "after": left},
            "difference": difference,
            "seconds": seconds,
        }

    def _features(self, model: nn.Module, source: Path, context: Context) -> list[dict[str, Tensor]]:
        from prune.calibration import calibration_batches

        return [dict(batch.features) for batch in calibration_batches(model, source, self.rows, context, "")]

    def _compacted(
        self, model: nn.Module, structure: Structure, features: dict[str, Tensor]
    ) -> tuple[nn.Module, dict[str, dict[str, int]]]:
        """Returns the small model, and how many heads and neurons went for which reason; changes the weights of the large one."""
        from prune.compact.disconnected import REASONS, disconnect
        from prune.compact.order import with_neurons_in_order
        from prune.surgery import shrink

        found = disconnect(model, structure, features)
        kept = with_neurons_in_order(model, structure, found.kept(structure))
        removed: dict[str, dict[str, int]] = {
            reason: {
                "heads": found.count(reason, "heads") + found.count(reason, "cross"),
                "neurons": found.count(reason, "ffn"),
            }
            for reason in REASONS
        }
        return shrink(model, structure, kept, self.key), removed

    def _difference(self, expected: list[Tensor], found: list[Tensor]) -> float:
        """Returns the largest absolute difference of an output.

        Raises:
            InputError: It is too large for another order of sums.
        """
        difference = max(float((before - after).abs().max()) for before, after in zip(expected, found, strict=True))
        largest = max(1.0, *(float(before.abs().max()) for before in expected))
        if not difference <= TOLERANCE * largest:
            raise InputError(
                self.key,
                f"outputs of up to {largest:.3g} would change by {difference:.3g}",
                "this architecture mixes its heads or neurons in a way that surgery does not follow",
                "leave compact out",
            )
        return difference


def _logits(model: nn.Module, features: list[dict[str, Tensor]]) -> list[Tensor]:
    import torch

    from foundation.models.forward import forward

    with torch.no_grad():
        return [forward(model, batch) for batch in features]


def _share_of_zeros(model: nn.Module) -> float:
    """Returns the share of zeros among the weights of the linear layers in the blocks."""
    from foundation.training.kept_zeros import block_linears

    weights = [layer.weight.detach() for layer in block_linears(model).values()]
    return sum(int((weight == 0).sum()) for weight in weights) / max(1, sum(weight.numel() for weight in weights))


def _parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())
