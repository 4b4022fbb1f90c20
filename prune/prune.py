"""The stage `prune`: a smaller model of the same weights, with real changes of shape, that every later stage takes.

A run is a list of steps, each in a file of its own: cut the vocabulary (`vocabulary`), score what may go (`scores`), divide the budget
between blocks (`allocation`, `sensitivity`), choose (`selection`), let what stays make up for what goes (`least_squares`), take it out
(`surgery`), and train again (`recovery`). With `schedule: cubic` everything after the vocabulary (`steps`) is done n times, for the
sparsities

    s_i = s share(i / n),   i = 1 ... n        (`cubic`)

Scores come from calibration rows of the train split, or are learned with the weights (`learned`); `sensitivity` and the guard of the
vocabulary come from selection rows. With `measure: latency` the cost is milliseconds of an engine (`timing`), which are measured again for
what comes of it. Left out: single weights, which the stage `sparsify` takes.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compress.artifacts.artifact import Artifact, writing
from compress.core.errors import InputError
from compress.core.tasks import TASKS
from compress.models.blocks import with_layers
from compress.models.origin import Origin
from compress.models.structure import Sizes, Structure
from compress.stage.context import Context
from prune.allocation import uniform
from prune.cost import count_of
from prune.learned import LEARNED, as_trained
from prune.recovery import check_recovery
from prune.selection import COMPONENTS, Scores, Whole, lowest_share, select
from prune.sensitivity import SCAN_ROWS, SHARES
from prune.settings import PruneSettings
from prune.steps import Steps
from prune.surgery import Kept, check_shapes, shrink
from prune.timing import Ruler, Timing, target_shape

if TYPE_CHECKING:
    from torch import nn

    from compress.data.splits import Data


class Prune(PruneSettings):
    """Takes heads, neurons, channels, layers, experts and tokens out of the model, and trains what is left."""

    VERSION: ClassVar[int] = 4

    def depends(self, context: Context) -> Any:
        """What is timed depends on the engine and the machine."""
        if self.measure != "latency":
            return None
        settings = context.measure_latency.settings if context.measure_latency else None
        return [context.target.model_dump(mode="json"), dict(context.fingerprint), settings]

    def work(self, macs: int, data: Data) -> float:
        """Forward and backward over calibration rows, a dozen passes over selection rows for each layer of a scan, and the training."""
        rows, scanned = min(self.rows, len(data.train)), min(SCAN_ROWS, len(data.selection)) * (self.allocation == "sensitivity")
        trained = (3.0 * len(data.train) + len(data.selection)) * self.recover.epochs + len(data.train) if self.recover else 0.0
        masks = 3.0 * len(data.train) * self.learn.epochs * (self.method in LEARNED)
        return macs * (len(self.shares) * (4.0 * rows + 12 * 2 * len(SHARES) * scanned) + trained + masks)

    def check(self, config: Any, teacher: Any, context: Context) -> None:
        """Finds out before the first stage runs whether this model can be pruned like that.

        Raises:
            InputError: It cannot.
        """
        key, answer = self.key, TASKS[context.task].answer
        if "vocabulary" in self.granularity and (TASKS[context.task].modality != "text" or answer == "tokens"):
            raise InputError(f"{key}.granularity: vocabulary given; {context.task} has no texts to split into fewer tokens: leave it out")
        if self.measure == "latency":
            target_shape(context, self.latency_ms, f"{key}.latency_ms")
        self._try_on_shapes(config)
        if self.recover is not None:
            after = self.config_after(config) if self.recover.named else config
            check_recovery(self.recover, self.taught, config, after, teacher, context)
            if self.method in LEARNED:  # masks are learned on the whole model
                check_recovery(as_trained(self.learn, self.recover), self.taught, config, config, teacher, context)

    def config_after(self, config: Any) -> Any:
        """The config of the pruned model, as far as it is known before. The vocabulary is kept.

        Of an allocation that depends on data it is that of a uniform one. Milliseconds count as multiply-accumulates, and of a time that is
        asked for it is not known which share it is: half, or as much as can go.
        """
        from compress.models.shapes import with_sizes

        kept, sizes = self.planned(config)
        return with_sizes(with_layers(config, kept.layers), kept.sizes(sizes), self.key)

    def planned(self, config: Any) -> tuple[Kept, Sizes]:
        """Returns what a uniform allocation keeps, by number rather than by importance, and the sizes before."""
        import torch

        from compress.models.shapes import on_meta

        model = on_meta(config)
        structure = Structure.of(model, self.key)
        sizes = structure.sizes
        parts = {(block, what): torch.zeros(count_of(sizes, block, what)) for block in range(structure.depth) for what in COMPONENTS}
        nothing = Scores(parts, torch.zeros(structure.depth), torch.zeros(sizes.hidden))
        cost, limits = self.cost(model, structure, None), self.limits(structure)
        whole, share = Whole.of(cost), 1 / self.speedup if self.speedup else self.shares[-1]
        if self.measure == "latency":
            share = max(share, lowest_share(cost, whole, limits, nothing))
        return select(cost, whole, share, limits, nothing, uniform, self.key), sizes

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, Any]:
        """Writes the pruned checkpoint.

        Returns:
            `method`, `measure`, `sparsity` (what was taken away), `cost` (of the blocks), `before` and `after` (the sizes), `layers` (those
            that are left, from 0), `steps` (for each iteration its share, its losses and looks at the selection split), and where asked for
            `vocabulary` and `sensitivity` (distances by layer and share). Of a model with experts `loads`: `before` and `after`, the share
            of the tokens that every expert of every block gets (`prune.routing`). With measure latency `latency`: the table, and what was
            predicted and measured of the model before, of every shape that was tried, and of the result.

        Raises:
            InputError: Not so much can be taken away, the tokenizer cannot be cut, or training failed.
        """
        from compress.models.checkpoint import load, save

        source, cut = self._cut_vocabulary(parent, context)
        model = load(source)
        structure = Structure.of(model, self.key)
        ruler = self._ruler(model, structure, source, context)
        first = self.cost(model, structure, ruler)
        whole, origin = Whole.of(first), Origin.whole(structure.depth, structure.sizes.hidden)
        routed = self._loads(model, structure, source, context)
        sparsity = self.sparsity
        if ruler is not None:
            lowest = lowest_share(first, whole, self.limits(structure))
            sparsity = ruler.sparsity(self.sparsity, whole.cost, lowest, f"{self.key}.{self.asked}")
        steps = Steps(self, self.id or self.NAME, whole, ruler, source, context)
        figures: list[dict[str, Any]] = []
        for number, share in enumerate(self.shares_of(sparsity), 1):
            model, origin, found = steps.iterate(number, share, model, origin)
            figures.append(found)
        last = Structure.of(model, self.key)
        cost = self.cost(model, last, ruler).total()
        taken = 1 - cost / whole.cost
        context.progress.log(f"  {taken:.1%} of the {self.measure} of the blocks taken away: {_words(structure.sizes, last.sizes)}")
        routed = {"before": routed, "after": self._loads(model, last, source, context)} if routed else {}
        save(model, source, out, f"Pruned by {self.method}: {taken:.1%} of the {self.measure} of its blocks")
        scans = [step.pop("sensitivity") for step in figures if "sensitivity" in step]
        return {
            "method": self.method,
            "measure": self.measure,
            "sparsity": taken,
            "cost": {"before": whole.cost, "after": cost},
            "before": asdict(structure.sizes),
            "after": asdict(last.sizes),
            "layers": list(origin.layers),
            "steps": figures,
            **({"vocabulary": cut} if cut else {}),
            **({"sensitivity": scans[0]} if scans else {}),
            **({"latency": ruler.figures} if ruler else {}),
            **({"loads": routed} if routed else {}),
        }

    def _try_on_shapes(self, config: Any) -> None:
        """Cuts a model that has shapes and no values.

        Raises:
            InputError: Something in it does not follow what is taken away.
        """
        from compress.models.shapes import on_meta, with_sizes

        kept, sizes = self.planned(config)
        large = on_meta(config)
        small = on_meta(with_sizes(with_layers(config, kept.layers), kept.sizes(sizes), self.key))
        check_shapes(Structure.of(large, self.key), kept, large.state_dict(), small.state_dict(), config.model_type, self.key)
        try:
            Structure.of(small, self.key)  # which runs it
        except InputError as error:
            raise InputError(
                f"{self.key}: a {config.model_type} without some of its {', '.join(self.granularity)} does not run, as something in it "
                "keeps its size; it cannot be pruned like that"
            ) from error

    def _loads(self, model: nn.Module, structure: Structure, source: Path, context: Context) -> Any:
        """Returns what share of the tokens every expert gets, by block; nothing for a model without experts."""
        from prune.calibration import calibration_batches
        from prune.routing import loads

        if not any(structure.sizes.experts):
            return []
        return loads(model, structure, calibration_batches(model, source, self.rows, context, f"{self.id or self.NAME}: routing"))

    def _ruler(self, model: nn.Module, structure: Structure, source: Path, context: Context) -> Ruler | None:
        """Measures the model that came in and the table of its blocks; None where no milliseconds are counted."""
        if self.measure != "latency":
            return None
        shape = target_shape(context, self.latency_ms, f"{self.key}.latency_ms")
        timing = Timing(model, source, context, shape, self.precision, context.scratch / "timing")
        return Ruler.of(timing, structure.sizes, self.multiple_of, self.latency_ms, self.speedup, self.key)

    def _cut_vocabulary(self, parent: Artifact, context: Context) -> tuple[Path, dict[str, Any]]:
        """Returns the checkpoint to go on with, and the figures of the vocabulary where it was cut.

        Raises:
            InputError: Too many tokens would become unknown.
        """
        if "vocabulary" not in self.granularity:
            return parent.path, {}
        from compress.models.checkpoint import load, save
        from prune.vocabulary import cut_vocabulary, write_tokenizer

        model, data = load(parent.path), context.data
        prepared = context.preprocessor(parent.path)
        cut = cut_vocabulary(parent.path, model.config, prepared, data.train.rows, data.selection.rows, self.key)
        if cut.unknown > self.max_unknown:
            raise InputError(
                f"{self.key}.max_unknown: {self.max_unknown:g} given; {cut.unknown:.2%} of the tokens of the selection rows would become "
                "unknown: raise it, or leave vocabulary out of granularity"
            )
        context.progress.log(f"  vocabulary: {len(cut.kept)} tokens are left, {cut.changed:.1%} of the selection rows are split otherwise")
        structure = Structure.of(model, self.key)
        small = shrink(model, structure, replace(Kept.everything(structure.sizes), vocabulary=cut.kept), self.key)
        folder = context.scratch / "vocabulary"
        with writing(folder) as temporary:
            save(small, parent.path, temporary, f"Vocabulary cut to {len(cut.kept)} tokens")
            write_tokenizer(parent.path, cut, temporary)
        return folder, cut.figures()


def _words(before: Sizes, after: Sizes) -> str:
    """Returns in words what is left."""
    counts = {
        "layers": (len(before.heads), len(after.heads)),
        "heads": (sum(before.heads), sum(after.heads)),
        "neurons": (sum(before.ffn), sum(after.ffn)),
        "channels": (before.hidden, after.hidden),
        "experts": (sum(before.experts), sum(after.experts)),
        "tokens": (before.vocabulary, after.vocabulary),
    }
    return ", ".join(f"{new} of {old} {name}" for name, (old, new) in counts.items() if new != old) or "nothing"
