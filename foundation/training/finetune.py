"""Finetuning on the labels of the train split.

    classification  loss_b = (1 - e) * -log p_b[y_b] + e * mean_c -log p_b[c]      e: label smoothing (https://arxiv.org/abs/1512.00567)
    regression      loss_b = (z_b - y_b)^2
    generation      loss_b = mean over the tokens t of a block of the classification loss, with y the token after t
    reranking       one of the losses over the candidates of a query (`foundation.training.losses.candidates`)
    image-text      the loss of the model itself (`foundation.training.losses.contrastive`)

with p = softmax of the logits z. The final weights are those with the best metric on the selection split, which is not trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, cast, get_args

from pydantic import Field, model_validator

from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.data.splits import Data, chosen_rows
from foundation.labels.tasks import tasks_with
from foundation.machine.parallel import Team
from foundation.stage.stage import Stage
from foundation.training.choices import OrderLoss, PairLoss
from foundation.training.few_parameters.kinds import check_few, config_with_few, training_few
from foundation.training.few_parameters.prefix_tuning import PrefixTuning
from foundation.training.few_parameters.prompt_tuning import PromptTuning
from foundation.training.settings import LearningRate, RowsInMemory, TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from foundation.models.size import Passes
    from foundation.stage.context import Context


class Finetune(TrainingSettings, Stage):
    """Trains the model on the labels. Must be the first stage; its output is the baseline."""

    VERSION: ClassVar[int] = 2
    NAME: ClassVar[str] = "finetune"
    LATER: ClassVar[tuple[str, ...]] = ("loss", "thresholds", "prompt", "prefix", "fraction", *TrainingSettings.LATER)

    learning_rate: LearningRate = 3e-5
    """Peak learning rate: 2e-5 to 5e-5 for a pretrained model, around 1e-3 for a small one with random weights."""
    micro_batch_size: RowsInMemory = None
    """Rows in memory at once, if a whole batch does not fit; the result is the same up to rounding and dropout. ranking and triplet compare
    the rows of the whole batch all the same, and run most rows forward twice for it."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target probability that is spread over all classes; 0 for regression."""
    loss: PairLoss | OrderLoss | None = None
    """For reranking. listwise (the default): the softmax over the candidates of a query. ranknet: every two of them that differ in their
    grades. lambdarank: the same, weighed by what swapping the two would change in NDCG. pointwise: the cross entropy of each by itself.
    For tasks with vectors. cosine (the default for pairs with scores): the cosine of a pair has to be its score. ranking (the default
    for pairs without scores, triplets, and queries and documents): the first text of a pair, of those with scores one with a high score,
    has to be nearer to the second than to all other second texts and all negatives of the batch. triplet: nearer by a margin than to the
    negatives of its row, or where there are none than to the nearest other second text. margin_mse (the default where there are margins):
    how much nearer it is to the second text than to each negative has to be the margin."""
    thresholds: bool | None = None
    """Where any number of labels may hold: puts a threshold for each label, the best for its F1 on selection rows, into the bias of the
    head, so that 0.5 decides everywhere. Where questions may have no answer: chooses how much more likely that has to be. Default: yes."""

    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the train rows to train on, chosen by content hash."""
    prompt: PromptTuning | None = None
    """Prompt tuning or P-tuning: trains virtual tokens before every text, and the head, instead of all weights; give {} for the defaults.
    Learning rates are larger, such as 1e-2. Needs a text with one answer; not with `lora`."""
    prefix: PrefixTuning | None = None
    """Prefix tuning or P-tuning v2: trains keys and values before those of every layer's attention, and the head, instead of all weights;
    give {} for the defaults. Learning rates are larger, such as 1e-2. Needs texts, and a model that does not write; not with `lora` or
    `prompt`."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        given = [name for name in ("prefix", "prompt", "lora") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]}: given with {given[1]}; leave one of them out")
        return self

    def config_after(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The Transformers config of the output: virtual tokens are rows of the embedding matrix, and a prefix is a size."""
        return config_with_few(config, self)

    def team(self, processes: Team) -> Team:
        """All processes train."""
        return processes

    def work(self, passes: Passes, data: Data) -> float:
        """Returns the work: forward and backward (twice the forward) for each row and epoch, and a forward pass of the selection split.

        Micro-batches whose rows are compared with each other run forward twice.
        """
        from foundation.training.losses.vector import compares_rows

        parted = (self.micro_batch_size or self.batch_size) < self.batch_size
        again = parted and self.loss not in get_args(OrderLoss) and compares_rows(cast("PairLoss | None", self.loss), data.train.labels)
        return passes.after * self.epochs * ((3.0 + again) * self.fraction * len(data.train.rows) + len(data.selection.rows))

    def check(self, config: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context) -> None:
        """Checks that the loss fits the task, and the adapters the model."""
        from foundation.training.allowed import check_training
        from foundation.training.supervised import check_labelled, check_loss
        from foundation.training.thresholds import FITS

        key = self.key
        if context.facts.two_towers:
            self._check_two_towers(config, key)
        check_loss(config, context, key, None, self.loss)  # `foundation.training.grad_cache` compares rows of several micro-batches
        if self.thresholds is not None and context.facts.answer.form not in FITS:
            raise InputError(f"{key}.thresholds", "given", f"it is for {tasks_with(lambda row: row.answer.form in FITS)}", "leave it out")
        if self.label_smoothing and not context.facts.answer.PROBABILITIES:
            raise InputError(f"{key}.label_smoothing", f"{self.label_smoothing:g} given", f"{context.task} has no classes", "leave it out")
        if self.fraction != 1 and context.data.train.together > 1:
            given, why = f"{self.fraction:g} given", f"some rows of {context.task} belong together, and it would part them"
            raise InputError(f"{key}.fraction", given, why, "leave it out")
        check_labelled(context.task, context.data, key)
        check_training(self, config, context, key)
        check_few(self, config, context)

    def _check_two_towers(self, config: PreTrainedConfig, key: str) -> None:
        """Raises if a setting does not fit the loss of a model with two towers."""
        if self.loss is not None:
            raise InputError(f"{key}.loss", f"{self.loss} given", f"a {config.model_type} has a loss of its own", "leave it out")
        if self.micro_batch_size is not None:
            given = f"{self.micro_batch_size} given"
            raise InputError(f"{key}.micro_batch_size", given, "contrastive compares the rows of a batch", "leave it out")

    def run(self, parent: Artifact, context: Context, out: Path) -> Mapping[str, object]:
        """Writes the trained checkpoint.

        Returns:
            `losses` per epoch, `selection` (metric, values, best step), `steps`, `seconds_per_step`, `autocast`.

        Raises:
            InputError: The train split is empty, the settings do not fit the task, or the loss became NaN or infinite.
        """
        from foundation.machine.device import computing_device
        from foundation.models.checkpoint import load, save
        from foundation.training.selection import selection_metric
        from foundation.training.supervised import supervised
        from foundation.training.thresholds import FITS
        from foundation.training.train import TrainConfig, Training, train

        device = computing_device()
        model = load(parent.path, "cpu" if context.team.shards else device)  # a sharded model is moved to the device block by block
        with training_few(model, self, parent.path, context) as few:
            source = few.source
            prepared = context.preprocessor(source)
            training = Training.of(
                context,
                prepared,
                TrainConfig.of(self),
                self.title,
                split=chosen_rows(context.data.train, self.fraction),
                select=selection_metric(context, prepared),
                depends=self.model_dump(mode="json", include={"label_smoothing", "loss", "prompt", "prefix"}, exclude_none=True),
            )
            objective = supervised(context.task, self.label_smoothing, self.loss, context.team, context.data.train.labels)
            history = train(model, objective, training)
        fit = FITS.get(context.facts.answer.form) if self.thresholds is not False else None
        moved = None if fit is None else fit(model, prepared, context)
        if context.team.is_first:
            note = f"Finetuned for {history.steps} steps of {self.batch_size} rows, peak learning rate {self.learning_rate:g}"
            save(model.cpu(), source, out, note)
        return {
            "losses": history.losses,
            "selection": {"metric": context.facts.metric, "values": history.selection, "best_step": history.best_step},
            "steps": history.steps,
            "seconds_per_step": history.seconds / max(1, history.steps),
            "autocast": history.autocast,
            **history.of_experts,
            **({} if moved is None else {"thresholds": moved}),
            **({} if few.parameters is None else {"trained_parameters": few.parameters}),
        }


def trained_here(context: Context) -> bool:
    """Whether this run trained the baseline, and so kept the selection rows out of its training."""
    return bool(context.checkpoints) and context.baseline.manifest["stage"] == Finetune.NAME
