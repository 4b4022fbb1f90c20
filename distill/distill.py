"""Knowledge distillation: a student learns from a teacher's answers and from what goes on inside of it.

    loss_b = hard_weight * hard_b(labels) + sum_i weight_i * loss_i,b(student, teacher)

`loss` names a published combination (`presets`), `losses` lists them one by one; each is a file of this folder. The student comes from the
incoming model (`distill.student`), the teacher is the baseline unless another is named, or several are (`distill.ensemble`). The weights
kept are the best on the selection split: by the labels where this run trained the baseline itself, else by agreement with the teacher, as
a baseline from outside may have been trained on those rows.

More rows to learn from: `extra_text` adds unlabelled text, `augment` masked copies (`distill.masking`); both take part in every loss but
that of the labels. With `corpus` the student learns the inside of the teacher on plain text and nothing of the task (task-agnostic, or
general, distillation: https://arxiv.org/abs/1909.10351, section 3.2, https://arxiv.org/abs/2012.15828); a stage for the task follows. Left
out: a masked language model beside it, which checkpoints of a task have no head for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compress.artifacts.artifact import Artifact
from compress.core.errors import InputError
from compress.core.tasks import TASKS, Task, num_classes
from compress.stage.context import Context
from compress.stage.stage import teachers_named
from compress.training.finetune import trained_here
from compress.training.selection import selection_metric
from distill.presets import PRESETS, Preset
from distill.settings import DistillSettings

if TYPE_CHECKING:
    from compress.data.splits import Data


class Distill(DistillSettings):
    """Trains a smaller model to answer as its teacher does."""

    VERSION: ClassVar[int] = 2
    TOGETHER: ClassVar[bool] = True

    def depends(self, context: Context) -> Any:
        """The contents of another checkpoint that is the student, and of further text."""
        from compress.models.config import ModelConfig
        from compress.models.importing import source_digest
        from distill.plain_text import digest, read_plain

        found: dict[str, str] = {}
        if self.student.path is not None:
            found["student"] = source_digest(ModelConfig(path=self.student.path, task=context.task, head=self.student.head))
        for name in ("extra_text", "corpus"):
            text = getattr(self, name)
            if text is not None:
                found[name] = digest(read_plain(text, f"{self.key}.{name}", context.progress.log))
        return found or None

    def work(self, macs: int, data: Data) -> float:
        """Forward and twice as much backward for every row of every epoch, the forwards of all teachers, and the selection split.

        Teachers whose answers are kept are asked once; one that is looked into, or asked about masked or mixed rows, in every epoch.
        """
        from distill.plain_text import read_plain

        rows = self.fraction * len(data.train)
        if self.corpus is not None:  # packed rows are fewer and longer
            rows, selection = self.fraction * len(read_plain(self.corpus, f"{self.key}.corpus")), 0
        else:
            selection = len(data.selection)
        rows += len(read_plain(self.extra_text, f"{self.key}.extra_text")) if self.extra_text is not None else 0
        rows *= 1 + (self.augment.copies if self.augment else 0)
        losses = self.resolved().losses
        live = self.augment is not None or any(not loss.ANSWERS_ONLY for loss in losses)
        asked = len(teachers_named(self)) * (self.epochs if live else 1) if losses else 0
        trained = 3.0 * rows * (1 + any(loss.OWN_INPUTS for loss in losses))
        return macs * (self.epochs * (trained + selection) + asked * rows)

    def config_after(self, config: Any) -> Any:
        """The config of the student."""
        from distill.student import student_config

        return student_config(self.student, config, f"{self.key}.student")

    def check(self, config: Any, teacher: Any, context: Context) -> None:
        """Finds out before the first stage runs whether student, teacher and losses fit each other and the task.

        Raises:
            InputError: They do not.
        """
        from compress.models.config import check_length
        from distill.objective import check_covered
        from distill.student import check_student

        if TASKS[context.task].answer == "tokens":
            self._check_tokens(context.task, self.resolved())
        self._check_rows(context)
        self._check_answers()
        num_labels = num_classes(context.task, context.data.labels)
        check_student(self.student, context.task, num_labels, f"{self.key}.student")
        after = self.config_after(config)
        if TASKS[context.task].modality == "text":
            check_length(after, context.max_length)
        preset = self.resolved()
        check_covered(preset.losses, preset.hard_weight, f"{self.key}.losses")
        for loss, setting in zip(preset.losses, self.settings(after, teacher, context), strict=True):
            loss.wants(setting)
            if loss.ACROSS_ROWS and self.micro_batch_size is not None:
                raise InputError(f"{setting.key}: compares the rows of a batch; leave micro_batch_size ({self.micro_batch_size} given) out")
            if loss.ACROSS_ROWS and context.team.size > 1:
                raise InputError(
                    f"{setting.key}: compares the rows of a batch, which {context.team.size} processes divide: run one process"
                )
            if loss.OWN_INPUTS and context.team.shards:
                raise InputError(f"{setting.key}: {loss.name} reads the embeddings, which fsdp2 divides; give parallel: {{strategy: ddp}}")

    def _check_rows(self, context: Context) -> None:
        """Raises where further rows do not go with the data of the run."""
        given = [name for name in ("extra_text", "augment", "corpus") if getattr(self, name) is not None]
        if given and (TASKS[context.task].modality != "text" or TASKS[context.task].answer == "tokens"):
            raise InputError(f"{self.key}.{given[0]}: given; {context.task} has no rows of text with an answer each: leave it out")
        pairs = isinstance(context.data.train.rows[0], tuple)
        if self.extra_text is not None and (self.extra_text.text_pair is not None) != pairs:
            kind, remedy = ("pairs of texts", "give") if pairs else ("single texts", "leave out")
            raise InputError(f"{self.key}.extra_text: the rows of the data are {kind}: {remedy} {self.key}.extra_text.text_pair")
        if self.corpus is not None and self.corpus.text_pair is not None:
            raise InputError(f"{self.key}.corpus.text_pair: {self.corpus.text_pair!r} given; a corpus is running text: leave it out")

    def _check_answers(self) -> None:
        """Raises where losses look inside of several teachers, or compare answers on a corpus."""
        losses = self.losses or PRESETS[self.loss or "soft_target"].losses
        inside = [loss.name for loss in losses if not loss.ANSWERS_ONLY]
        count = len(teachers_named(self))
        if count > 1 and inside:
            raise InputError(f"{self.teacher_key}: {count} given; {inside[0]} looks inside of one: give one teacher, or loss: soft_target")
        if self.corpus is None:
            return
        answers = [loss.name for loss in self.losses if loss.COMPARES_ANSWERS]
        if answers or not self.resolved().losses:
            raise InputError(
                f"{self.key}.corpus: given, and {answers[0] if answers else self.loss or 'soft_target'} compares answers; a corpus teaches "
                "the inside of the teacher: give loss: minilmv2, minilm, tinybert, distilbert, pkd or relational"
            )

    def _check_tokens(self, task: Task, preset: Preset) -> None:
        """Raises where a model that answers token by token cannot be distilled in this way."""
        if self.student.path is not None:
            raise InputError(f"{self.key}.student.path: {self.student.path} given; {task} keeps the tokens of the incoming model")
        other = [loss.name for loss in preset.losses if loss.ONE_ANSWER]
        if other:
            where = f"loss: {self.loss}" if self.loss else f"losses: {other[0]}"
            raise InputError(f"{self.key}.{where} given; {other[0]} compares one answer a row, {task} has many: give soft_target")

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, Any]:
        """Writes the student as a checkpoint.

        Returns:
            `losses` per epoch, `selection` (metric, values, best step), `steps`, `seconds_per_step`, `autocast`, `rows`, `teacher`,
            `teacher_logits` (cached or live).

        Raises:
            InputError: Student, teacher or losses do not fit each other, or the loss became NaN or infinite.
        """
        from compress.machine.parallel import shard
        from compress.models.blocks import repeated_blocks
        from compress.models.checkpoint import load, save
        from compress.training.train import TrainConfig, Training, autocast_dtype, train, training_device
        from distill.steps import Steps
        from distill.student import build
        from distill.teacher import freeze

        assert context.teachers, "the pipeline hands over the teachers"
        device, team = training_device(), context.team
        student, source = build(self.student, parent.path, context, f"{self.key}.student")
        steps = Steps(self, source, context)
        folders = [steps.teacher_folder(number) for number in range(len(context.teachers))]
        if team.shards:  # what is divided goes to the device block by block, the student within `train`
            teachers = [freeze(load(folder)) for folder in folders]
            teachers = [shard(teacher, repeated_blocks(teacher, self.teacher_key)[1]) for teacher in teachers]
        else:
            student.to(device)
            teachers = [freeze(load(folder, device)) for folder in folders]
        prepared = context.preprocessor(source)
        theirs = [context.preprocessor(folder) for folder in folders]
        split, num_labelled = steps.rows()
        objective = steps.objective(student, teachers, prepared, theirs, split, num_labelled)
        outside = not trained_here(context) and TASKS[context.task].needs_labels
        judged = steps.judged(teachers, theirs) if outside and self.corpus is None else context
        training = Training.of(
            context,
            prepared,
            TrainConfig.of(self),
            self.id or self.NAME,
            split=split,
            select=selection_metric(judged, prepared) if self.corpus is None else None,
            depends={"stage": self.model_dump(mode="json"), "teachers": [teacher.digest for teacher in context.teachers]},
            team=team,
        )
        history = train(student, objective.to(device), training)
        if team.is_first:
            save(
                student.cpu(),
                source,
                out,
                f"Distilled for {history.steps} steps of {self.batch_size} rows, peak learning rate {self.learning_rate:g}",
            )
        metric = TASKS[context.task].metric + (" against the teacher" if outside else "")
        return {
            "losses": history.losses,
            "selection": {"metric": metric, "values": history.selection, "best_step": history.best_step},
            "steps": history.steps,
            "seconds_per_step": history.seconds / max(1, history.steps),
            "autocast": str(autocast_dtype(device)).removeprefix("torch."),
            "rows": len(split),
            "labelled_rows": num_labelled,
            "teacher": " + ".join(teacher.id for teacher in context.teachers),
            "teacher_logits": "live" if objective.pair.teacher.logits is None else "cached",
        }
