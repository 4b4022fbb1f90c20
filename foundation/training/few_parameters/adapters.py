"""The stage `adapters`: low-rank adapters for several kinds of rows, on one model that stays as it is.

    rows of the train split   -> by the name in their column `adapter` -> one training each: A, B of the chosen layers, and the head
    the checkpoint            -> the same bytes, with `adapters.json` and `adapters.safetensors` next to them

A model that is quantized keeps its integers: all adapters share them. Each adapter is trained on the float weights that these integers
stand for (without the rounding of activations), and added to the outputs of the layers in float
(`foundation.models.layers.adapter_stack`). The head is trained whole; its change is a change of full rank.

Every adapter starts from the same model with the same seed, so that its training does not depend on the others. Afterwards the model with
all adapters answers selection rows of each like the model whose weights one adapter was merged into, or the stage fails.

Left out: adapters for tasks with different labels; rows that several adapters answer; a stage that trains or changes the model afterwards.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from foundation.artifacts.artifact import MANIFEST, Artifact
from foundation.core.engines import REFERENCE, served_on
from foundation.core.errors import InputError, nearest
from foundation.core.named import one_of
from foundation.data.splits import Data, Split
from foundation.models.adapter_names import NAME as ADAPTER_NAME
from foundation.stage.stage import ModelStage
from foundation.standalone.adapted import adapter_of, listed
from foundation.training.few_parameters.lora import Lora
from foundation.training.settings import LearningRate, TrainingSettings

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from foundation.models.layers.adapter_stack import Adapter
    from foundation.models.size import Passes
    from foundation.stage.context import Context
    from foundation.training.history import History

ENGINES = (*served_on("cpu"), REFERENCE)
"""Engines that compute a model with adapters."""
PROVED_ROWS, TOLERANCE = 64, 1e-3
"""Selection rows of each adapter that are compared with its merged model, and the largest difference of a logit."""


class Adapters(TrainingSettings, ModelStage):
    """Trains an adapter for each name in the column `data.columns.adapter`, on the rows that have this name. The model stays as it is, and
    every request names the adapter that answers it."""

    NAME: ClassVar[str] = "adapters"

    learning_rate: LearningRate = 5e-4
    """Peak learning rate; ten times as large as for all weights."""
    lora: Lora = Lora(rank=8, alpha=16)
    """Rank, scale and layers of the adapters."""
    base: Annotated[str, Field(pattern=f"^{ADAPTER_NAME}$")] | None = None
    """Name by which requests may ask for the model without an adapter; absent: they may not."""

    def work(self, passes: Passes, data: Data) -> float:
        """Returns the work: forward and backward (twice the forward) for each row and epoch, and a forward pass of the selection split."""
        return passes.after * self.epochs * (3.0 * len(data.train.rows) + len(data.selection.rows))

    def check(self, config: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context) -> None:
        """Checks that rows name adapters, that each has rows to learn from, and that the engines compute adapters.

        Raises:
            InputError: They do not.
        """
        from foundation.training.allowed import check_training
        from foundation.training.supervised import check_labelled

        key = self.key
        if not context.facts.answers_whole_texts:
            raise InputError(key, f"given for {context.task}", "adapters are for texts with classes or a value", "leave it out")
        if context.aggregate:
            raise InputError(key, "given with data.windows", "windows of a text name no adapter", "leave one of them out")
        others = [engine for engine in context.target.engines if engine not in ENGINES]
        if others or context.target.device != "cpu":
            given = f"{others[0]} given" if others else f"device {context.target.device} given"
            raise InputError("target.engines" if others else "target.device", given, f"{one_of(ENGINES)} on the cpu compute adapters")
        check_labelled(context.task, context.data, key)
        self._check_rows(context.data)
        for name in trained_names(context.data):
            check_training(self, config, for_adapter(context, name), key)

    def _check_rows(self, data: Data) -> None:
        """Raises if a row names no adapter, or one that has no train rows."""
        names = trained_names(data)
        if not names:
            where = "rows say nothing of adapters" if data.train.rows else "there are no train rows"
            raise InputError(self.key, f"given, but {where}", remedy="name the column of adapters: data.columns.adapter")
        if self.base in names:
            raise InputError(f"{self.key}.base", f"{self.base} given", "rows of this name have an adapter", "give another name")
        known = [*names, *([self.base] if self.base else [])]
        for split, rows in (("selection", data.selection.rows), ("evaluation", (data.hidden or data.evaluation).rows)):
            for row in rows:
                if (name := str(adapter_of(row))) not in known:
                    learnt = f"train rows name {listed(names)}{nearest(name, names)}"
                    raise InputError("data.columns.adapter", f"a row of the {split} split names {name}", learnt, "give it train rows, too")

    def run(self, parent: Artifact, context: Context, out: Path) -> Mapping[str, object]:
        """Writes the checkpoint of the parent with the adapters next to it.

        Returns:
            `adapters`: by name its `rows`, `losses`, `selection` (metric, values, best step), `parameters` and `difference`: the largest
            difference of a logit to the merged model, on selection rows; `base`, where the plain model is offered.

        Raises:
            InputError: A loss became NaN or infinite, a layer does not read the rows of the batch, or the adapters do not answer as their
                merged models.
        """
        from foundation.models.adapter_files import write_adapters
        from foundation.models.checkpoint import load_float

        for file in sorted(parent.path.iterdir()):
            if file.name != MANIFEST:
                shutil.copyfile(file, out / file.name)
        names = trained_names(context.data)
        adapters: dict[str, Adapter] = {}
        figures: dict[str, dict[str, object]] = {}
        for name in names:
            context.progress.log(f"  adapter {name}")
            model = load_float(parent.path)
            adapters[name], history, parameters = self._trained(model, parent.path, for_adapter(context, name), name)
            figures[name] = {
                "rows": len(for_adapter(context, name).data.train),
                "losses": history.losses,
                "selection": {"metric": context.facts.metric, "values": history.selection, "best_step": history.best_step},
                "parameters": parameters,
            }
        if self.base:
            adapters[self.base] = {}
        write_adapters(out, adapters)
        note = f"Adapters on one model: {', '.join(adapters)}; each row names one"
        card = (out / "README.md").read_text(encoding="utf-8") if (out / "README.md").is_file() else "# Model\n"
        (out / "README.md").write_text(f"{card.rstrip()}\n- {note}\n", encoding="utf-8")
        for name, difference in self._proved(parent.path, out, adapters, context).items():
            figures.setdefault(name, {})["difference"] = difference
        return {"adapters": figures, **({"base": self.base} if self.base else {})}

    def _trained(self, model: nn.Module, source: Path, context: Context, name: str) -> tuple[Adapter, History, int]:
        """Trains one adapter on a float model; returns its changes, the history, and the number of trained parameters."""
        from foundation.machine.device import computing_device
        from foundation.training.few_parameters.adapter_training import changed_heads, changes_of, heads_of, only_trainable
        from foundation.training.few_parameters.lora import attached
        from foundation.training.selection import selection_metric
        from foundation.training.state import seeded
        from foundation.training.supervised import supervised
        from foundation.training.train import TrainConfig, Training, train

        label, model = f"{self.title} {name}", model.to(computing_device())
        heads = heads_of(model)
        with seeded(context.seed):
            attached(model, self.lora, label)
        parameters = only_trainable(model, heads)
        before = {head: [one.detach().clone() for one in layer.parameters()] for head, layer in heads.items()}
        prepared = context.preprocessor(source)
        training = Training.of(
            context,
            prepared,
            TrainConfig.of(self, lora=None),  # they are on the model already
            label,
            select=selection_metric(context, prepared),
            depends={"adapter": name, "lora": self.lora.model_dump(mode="json")},
        )
        history = train(model, supervised(context.task, 0.0, None, context.team, context.data.train.labels), training)
        return {**changes_of(model), **changed_heads(heads, before)}, history, parameters

    def _proved(self, source: Path, out: Path, adapters: Mapping[str, Adapter], context: Context) -> dict[str, float]:
        """Compares the float model with all adapters with each merged model; returns the largest difference of a logit by adapter.

        Raises:
            InputError: A difference is too large.
        """
        from foundation.measure.predictions import compared
        from foundation.models.checkpoint import load_float
        from foundation.models.layers.adapter_stack import merge, put

        whole = load_float(source)
        put(whole, list(adapters.values()))
        found = {}
        for name, adapter in adapters.items():
            rows = for_adapter(context, name).data.selection.rows[:PROVED_ROWS]
            if not rows:
                continue
            merged = load_float(source)
            merge(merged, adapter)
            answers = compared(whole, context.preprocessor(out), rows, PROVED_ROWS)
            found[name] = float(abs(answers - compared(merged, context.preprocessor(source), rows, PROVED_ROWS)).max())
            if not found[name] <= TOLERANCE:
                reason = f"its logits differ by {found[name]:.1e} from those of its merged model; {TOLERANCE:g} is allowed"
                raise InputError(f"{self.key}: adapter {name}", reason, remedy="leave layers out of lora.layers, or train at a lower rate")
        return found


def trained_names(data: Data) -> list[str]:
    """Returns the names of the adapters that train rows name, in the order of the alphabet."""
    return sorted({name for row in data.train.rows if (name := adapter_of(row)) is not None})


def for_adapter(context: Context, name: str) -> Context:
    """Returns the context with the train and selection rows of one adapter, and a scratch folder of its own."""
    data = context.data
    own = replace(data, train=_only(data.train, name), selection=_only(data.selection, name))
    return replace(context, data=own, scratch=context.scratch / name)


def _only(split: Split, name: str) -> Split:
    return split.take(_rows_of(split.rows, name))


def _rows_of(rows: Sequence[Any], name: str) -> list[int]:
    return [index for index, row in enumerate(rows) if adapter_of(row) == name]
