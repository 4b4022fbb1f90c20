"""The stage `sparsify`: zeros inside the matrices of the blocks, whose shapes stay; the stage `prune` changes shapes.

No speed is claimed: engines multiply zeros like any other number, and files are as large as before until something packs them. The one
exception are kernels for 2:4, which NVIDIA GPUs have from Ampere on and which TensorRT takes where it is told to look for them and finds
them faster. What zeros have emptied (whole neurons, whole heads) a later `prune` can take out.

    magnitude, wanda, sparsegpt    choose, in one go                              `prune.sparsify.one_shot`
    movement                       train weights and scores of them together      `prune.sparsify.movement`
    lasso                          train under a penalty, then zero what is small `prune.sparsify.lasso`
    recover                        train what is left, zeros staying zeros        `prune.recovery`, `compress.training.kept_zeros`

in patterns of `prune.sparsify.patterns`. Every linear layer inside the repeated blocks gets the same share of zeros. From then on the
checkpoint says that its zeros are to be kept, which every later training does; rounding to symmetric grids keeps them anyway. Rows for
choosing are calibration rows of the train split. Whole blocks cannot make every share of zeros: where they come nowhere near it in a layer,
that is an error before anything is trained. Left out: a share for each layer; experts that are one stacked tensor; models too large for
memory.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compress.artifacts.artifact import Artifact, write_json, writing
from compress.core.errors import InputError, nearest
from compress.models.blocks import repeated_blocks
from compress.models.origin import Origin
from compress.models.structure import Structure
from compress.stage.context import Context
from compress.training.kept_zeros import block_linears, keep_zeros
from compress.training.train import History, Objective
from prune.calibration import calibration_batches
from prune.emptied import emptied, unread
from prune.forward_order import Features
from prune.recovery import Recover, check_recovery, recover
from prune.sparsify.lasso import QUANTILES, Lasso, balanced_mask, balanced_share, layer_mask, pieces, quantiles, strengths
from prune.sparsify.movement import Movement, extract, insert
from prune.sparsify.one_shot import zero_gone, zero_weights
from prune.sparsify.patterns import NM, Blocks, block_sizes, block_sums, reachable
from prune.sparsify.settings import LEARNING, RECOVERY, SparsifySettings
from prune.sparsify.sparsegpt import reachable_by_strips

if TYPE_CHECKING:
    from torch import Tensor, nn

    from compress.data.splits import Data


ZEROED, FIGURES = "zeroed", "zeroed.json"


NO_SPEED = "engines multiply zeros like any other number: no speed is claimed"


TWO_FOUR = "TensorRT alone multiplies 2:4 faster, on NVIDIA GPUs from Ampere on, where it is told to and finds it so: no speed is claimed"


NEAR = 0.05
"""How far the share of zeros that whole blocks can make of a layer may be from the share asked for."""


class Sparsify(SparsifySettings):
    """Puts zeros into the matrices of the blocks, without changing a shape; claims no speed."""

    VERSION: ClassVar[int] = 2

    def work(self, macs: int, data: Data) -> float:
        """Some passes over calibration rows, and the trainings."""
        epochs = (self.learning.epochs if self.learns else 0.0) + (self.recover.epochs if self.recover else 0.0)
        looked = 6.0 * min(self.rows, len(data.train)) * (self.method in ("wanda", "sparsegpt"))
        return macs * (looked + (3.0 * len(data.train) + len(data.selection)) * epochs)

    def check(self, config: Any, teacher: Any, context: Context) -> None:
        """Finds out before the first stage runs whether this model can get zeros like that.

        Raises:
            InputError: It is no stack of blocks, a pattern of names matches nothing, blocks cannot make so many zeros, or the teacher does
                not fit.
        """
        from compress.models.shapes import on_meta

        self._check_share(self.layers_of(on_meta(config)))
        for name, settings in ((LEARNING, self.learning if self.learns else None), (RECOVERY, self.recover)):
            if settings is not None:
                check_recovery(settings, self.asked_in(name), config, config, teacher, context)

    def _check_share(self, layers: Mapping[str, nn.Linear]) -> None:
        """Finds out whether whole blocks come near to the share of zeros.

        Raises:
            InputError: They do not, in some layer.
        """
        reached = {shape: self._reached(*shape) for shape in {layer.weight.shape for layer in layers.values()}}
        far = {name: layer for name, layer in layers.items() if abs(reached[layer.weight.shape] - self.asked) > NEAR}
        if far:
            name, layer = next(iter(far.items()))
            raise InputError(
                f"{self.key}.pattern: {self.zeros} given; in {len(far)} of {len(layers)} layers it comes to a share of zeros more than "
                f"{NEAR:g} away from sparsity: {self.asked:g} (to {reached[layer.weight.shape]:.3f} in {name}, {layer.out_features} x "
                f"{layer.in_features}); give smaller blocks, or name these layers in exclude"
            )

    def _reached(self, outputs: int, inputs: int) -> float:
        """Returns the share of the weights of a matrix that become 0."""
        blocks, shape, asked = self.zeros, (outputs, inputs), self.asked
        if not isinstance(blocks, Blocks):
            return asked
        if self.method == "sparsegpt":
            return reachable_by_strips(shape, blocks, asked) / (outputs * inputs)
        groups = pieces(blocks, self.lasso.groups) if self.method == "lasso" else (blocks,)
        if self.method == "lasso" and self.lasso.threshold == "balanced":
            return balanced_share(shape, blocks, self.lasso.groups, asked)
        if len(groups) > 1:  # lines of a block, whose weights overlap: a line more or less decides
            return asked
        return reachable(shape, groups[0], asked) / (outputs * inputs)

    def layers_of(self, model: nn.Module) -> dict[str, nn.Linear]:
        """Returns the layers that get zeros, by module name.

        Raises:
            InputError: There are none, or a pattern of names matches nothing.
        """
        prefix, _ = repeated_blocks(model, self.key)
        layers = {name: layer for name, layer in block_linears(model).items() if name.startswith(f"{prefix}.")}
        named = f"layers are named like {', '.join(list(layers)[:3])}"
        given = {f"{self.key}.exclude": self.exclude, f"{self.key}.lasso.strengths": tuple(self.lasso.strengths or ())}
        problems = [
            f"{key}: {pattern!r} matches no layer; {named}{nearest(pattern, layers)}"
            for key, patterns in given.items()
            for pattern in patterns
            if not fnmatch.filter(layers, pattern)
        ]
        if problems:
            raise InputError(*problems)
        chosen = {name: layer for name, layer in layers.items() if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude)}
        if not chosen:
            raise InputError(f"{self.key}: no linear layer in the blocks is left to put zeros into; shorten exclude")
        return chosen

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, Any]:
        """Writes the sparse checkpoint.

        Returns:
            `method`, `pattern`, `asked` and `sparsity` (shares of zeros, of all layers that get them), `speed` (what is claimed), `layers`
            (for each its name, `weights`, `zeros`, `sparsity`, the `outputs` and `inputs` that are 0 from end to end, and for blocks
            `blocks` and `zero_blocks`), `unread` (heads and neurons that nobody reads; null with a `reason` where they cannot be told),
            `unreached` (layers without zeros, as no calibration row came to them), and of each training that there was, `learning` and
            `recovery`, the losses, looks at the selection split and steps. Of lasso `groups`: quantiles of the root mean squares of the
            groups of each layer before and after the training.

        Raises:
            InputError: The model is no stack of blocks, blocks cannot make so many zeros, its input is not finite, or training failed.
        """
        from compress.models.checkpoint import save

        model, figures = self._zeroed(parent.path, context)
        layers = self.layers_of(model)
        self._warn(model, layers, context)
        if self.recover is not None:
            history = self._train(model, self.recover, parent.path, context, RECOVERY)
            figures |= {"recovery": _figures(history)}
        rows = [self._row(name, layer.weight.detach()) for name, layer in layers.items()]
        zeros, weights = (sum(row[key] for row in rows) for key in ("zeros", "weights"))
        nobody = self._unread(model)
        speed = TWO_FOUR if self.zeros == NM(2, 4) else NO_SPEED
        share = f"{zeros / weights:.2%} of the weights of {len(rows)} layers are 0 ({self.zeros})"
        dead = f"{nobody['heads']} heads and {nobody['neurons']} neurons are read by nobody; " if nobody.get("heads") is not None else ""
        context.progress.log(f"  {share}; {dead}{speed}")
        save(model, parent.path, out, f"Zeros by {self.method}: {share}; shapes are as before, and {speed}")
        return {
            "method": self.method,
            "pattern": str(self.zeros),
            "asked": self.asked,
            "sparsity": zeros / weights,
            "speed": speed,
            "layers": rows,
            "unread": nobody,
            **figures,
        }

    def _zeroed(self, source: Path, context: Context) -> tuple[nn.Module, dict[str, Any]]:
        """Returns the model with its zeros, before it is trained again, and the figures of that; a finished one from the scratch folder."""
        from compress.models.checkpoint import load, save

        folder = context.scratch / ZEROED
        if (folder / FIGURES).is_file():
            context.progress.log(f"  {self.id or self.NAME}: the zeros are chosen already")
            found: dict[str, Any] = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
            return load(folder), found
        model = load(source)
        self._check_share(self.layers_of(model))  # an earlier stage may have made them narrower than `check` knew
        if self.learns:
            figures = (self._by_movement if self.method == "movement" else self._by_lasso)(model, source, context)
        else:
            figures = self._in_one_go(model, source, context)
        keep_zeros(model)
        with writing(folder) as temporary:
            save(model, source, temporary, "Zeros chosen")
            write_json(temporary / FIGURES, figures)
        return model, figures

    def _warn(self, model: nn.Module, layers: Mapping[str, nn.Linear], context: Context) -> None:
        """Warns of weights that have no zeros, or not in the pattern."""
        label, pattern = self.id or self.NAME, self.zeros
        prefix, _ = repeated_blocks(model, self.key)
        stacked = [name for name, weight in model.named_parameters() if weight.ndim == 3 and name.startswith(f"{prefix}.")]
        if stacked:
            num_blocks = len({name.removeprefix(f"{prefix}.").split(".")[0] for name in stacked})
            context.progress.warn(
                f"{label}: {len(stacked)} stacked weights of experts in {num_blocks} blocks have no zeros put into them, first {stacked[0]}"
            )
        if isinstance(pattern, NM):
            ragged = {name: layer for name, layer in layers.items() if layer.in_features % pattern.group}
            if ragged:
                name, layer = next(iter(ragged.items()))
                context.progress.warn(
                    f"{label}: {len(ragged)} layers have a number of inputs that {pattern.group} does not divide, first {name} "
                    f"({layer.in_features}): their last group of {pattern} is smaller, and no kernel for {pattern} takes them"
                )

    def _in_one_go(self, model: nn.Module, source: Path, context: Context) -> dict[str, Any]:
        """Zeroes weights by a method that does not train."""
        from compress.training.train import training_device

        assert not self.learns, self.method
        layers = self.layers_of(model.to(training_device()))

        def features() -> list[Features]:
            return [batch.features for batch in calibration_batches(model, source, self.rows, context, "")]

        with context.progress.bar(f"{self.id or self.NAME}: {self.method}", len(layers)) as advance:
            unreached = zero_weights(self.method, model, layers, self.zeros, self.asked, features, self.key, advance)  # type: ignore[arg-type]
        model.cpu()
        if unreached:
            context.progress.warn(
                f"{self.id or self.NAME}: {len(unreached)} layers are reached by no calibration row and have no zeros, first {unreached[0]}"
            )
        return {"unreached": unreached}

    def _by_movement(self, model: nn.Module, source: Path, context: Context) -> dict[str, Any]:
        """Learns the zeros with the weights."""
        pattern = self.zeros
        assert not isinstance(pattern, NM), pattern
        insert(model, self.layers_of(model), pattern)
        around = partial(Movement, sparsity=self.asked, warmup=self.movement.warmup, cooldown=self.movement.cooldown)
        history = self._train(model, self.learning, source, context, LEARNING, around)
        extract(model, self.asked)
        return {"unreached": [], "learning": _figures(history)}

    def _by_lasso(self, model: nn.Module, source: Path, context: Context) -> dict[str, Any]:
        """Trains under the penalty, then zeroes the groups that became small."""
        blocks, settings = self.zeros, self.lasso
        assert isinstance(blocks, Blocks), blocks
        layers, shapes = self.layers_of(model), pieces(blocks, settings.groups)
        lambdas = strengths(list(layers), settings.strength, settings.strengths or {})
        before = quantiles(layers, shapes)
        around = partial(Lasso, layers=layers, strengths=lambdas, shapes=shapes, reweight=settings.reweight)
        history = self._train(model, self.learning, source, context, LEARNING, around)
        after = quantiles(layers, shapes)
        for layer in layers.values():
            weight_OI = layer.weight.detach()
            balanced = settings.threshold == "balanced"
            zero_gone(
                layer,
                balanced_mask(weight_OI, blocks, settings.groups, self.asked) if balanced else layer_mask(weight_OI, shapes, self.asked),
            )
        groups = {"quantiles": list(QUANTILES), "before": before, "after": after}
        return {"unreached": [], "learning": _figures(history), "groups": groups}

    def _train(
        self,
        model: nn.Module,
        settings: Recover,
        source: Path,
        context: Context,
        folder: str,
        around: Callable[[Objective], Objective] = lambda objective: objective,
    ) -> History:
        """Trains the model in place, in a folder of the scratch folder; leaves it on the CPU."""
        config: Any = model.config
        assert context.teacher is not None, "the pipeline hands over the teacher"
        return recover(
            model,
            settings,
            settings.epochs,
            Origin.of_config(config),
            source,
            self.asked_in(folder),
            context,
            context.scratch / folder,
            self.id or self.NAME,
            {"stage": self.model_dump(mode="json"), "teacher": context.teacher.digest, "phase": folder},
            around,
        )

    def _row(self, name: str, weight_OI: Tensor) -> dict[str, Any]:
        """Returns the figures of one layer."""
        pattern, zeros = self.zeros, int((weight_OI == 0).sum())
        row: dict[str, Any] = {"name": name, "weights": weight_OI.numel(), "zeros": zeros, "sparsity": zeros / weight_OI.numel()}
        if isinstance(pattern, Blocks):
            empty = block_sums((weight_OI != 0).long(), pattern) == 0
            row |= {"blocks": block_sizes(weight_OI.shape, pattern).numel(), "zero_blocks": int(empty.sum())}
        return row | emptied(weight_OI)

    def _unread(self, model: nn.Module) -> dict[str, Any]:
        """Returns how many heads and neurons nobody reads, or why that cannot be told."""
        try:
            return dict(unread(model, Structure.of(model, self.key)))
        except InputError as error:
            return {"heads": None, "neurons": None, "reason": error.problems[0]}


def _figures(history: History) -> dict[str, Any]:
    return {"losses": history.losses, "selection": history.selection, "best_step": history.best_step, "steps": history.steps}
