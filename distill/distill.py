"""Knowledge distillation: a student learns from a teacher's logits, hidden states and attention.

    loss_b = hard_weight * hard_b(labels) + sum_i weight_i * loss_i,b(student, teacher)

`loss` selects a published combination of losses, `losses` lists individual ones (`foundation.training.losses.distillation`). The student is
derived from the incoming model (`distill.student`). The teacher is the baseline by default; several teachers are averaged
(`foundation.training.distillation.ensemble`). The best weights on the selection split are kept: measured against the labels if this run
trained the baseline, else by agreement with the teacher, as an external baseline may have been trained on those rows.

Further training data: `extra_text` adds unlabelled text, `augment` copies with masked tokens; both are used by every loss except the
hard-target loss. With `corpus` the student learns the teacher's internals on plain text, independent of the task (task-agnostic or
general distillation: https://arxiv.org/abs/1909.10351, section 3.2, https://arxiv.org/abs/2012.15828); add a stage for the task after it.
Not supported: masked language modelling alongside, as task checkpoints have no head for it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from distill.settings import DistillSettings
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.labels.tasks import TASKS, Task, num_classes, tasks_with
from foundation.training.few_parameters.kinds import check_few, config_with_few, training_few

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import PreTrainedConfig

    from distill.steps import Lesson, Steps
    from foundation.data.splits import Data
    from foundation.machine.parallel import Team
    from foundation.models.size import Passes
    from foundation.stage.context import Context
    from foundation.training.history import History
    from foundation.training.losses.distillation.loss import Setting


class Distill(DistillSettings):
    """Trains a smaller model to reproduce the predictions of a teacher."""

    VERSION: ClassVar[int] = 3

    def team(self, processes: Team) -> Team:
        """All processes train."""
        return processes

    def depends(self, context: Context) -> object:
        """Digests of the student's checkpoint (`student.path`), `extra_text`, `corpus`, and of a labeller's model and prompts."""
        from distill.labeller import goal
        from distill.plain_text import digest, read_plain
        from foundation.models.config import ModelConfig
        from foundation.models.importing import source_digest

        digests: dict[str, object] = {}
        if self.student.path is not None:
            digests["student"] = source_digest(ModelConfig(path=self.student.path, task=context.task, head=self.student.head))
        for name in ("extra_text", "corpus"):
            text = getattr(self, name)
            if text is not None:
                digests[name] = digest(read_plain(text, f"{self.key}.{name}", context.progress.log))
        if self.labeller is not None:
            digests["labeller"] = goal.depends(self.labeller, self.teacher_key)
        return digests or None

    def work(self, passes: Passes, data: Data) -> float:
        """The student's forward and backward passes (1 : 2) over every row of every epoch, its passes over the selection split, and the
        teachers' forward passes.

        A teacher counts as the input model. Teachers with cached logits run once over the rows; a teacher of which more is captured, or
        that runs on masked or mixed rows, runs in every epoch.
        """
        from distill.labeller import goal
        from distill.plain_text import read_plain
        from foundation.stage.stage import teachers_named

        rows = self.fraction * len(data.train)
        if self.corpus is not None:  # packed rows are fewer and longer
            rows, selection = self.fraction * len(read_plain(self.corpus, f"{self.key}.corpus")), 0
        else:
            selection = len(data.selection)
        rows += len(read_plain(self.extra_text, f"{self.key}.extra_text")) if self.extra_text is not None else 0
        rows *= 1 + (self.augment.copies if self.augment else 0)
        losses = self.resolved().losses
        live = self.augment is not None or self.on_policy is not None or any(not loss.ANSWERS_ONLY for loss in losses)
        teacher_passes = len(teachers_named(self)) * (self.epochs if live else 1) if losses else 0
        sampled = self.on_policy.share if self.on_policy else 0.0
        again = float(self.micro_batch_size is not None and self.micro_batch_size < self.batch_size and self._compares(data))
        trained = (3.0 + sampled + again) * rows * (1 + any(loss.OWN_INPUTS for loss in losses))
        labels = goal.work(self.labeller, round(rows) + selection, self.teacher_key) if self.labeller is not None else 0.0
        return passes.after * self.epochs * (trained + selection) + passes.before * teacher_passes * rows + labels

    def _compares(self, data: Data) -> bool:
        """Whether a loss compares the rows of a batch; micro-batches are then run forward twice."""
        from foundation.training.losses.vector import compares_rows

        preset = self.resolved()
        hard = preset.hard_weight != 0 and compares_rows(None, data.train.labels)
        return hard or any(loss.ACROSS_ROWS for loss in preset.losses)

    def config_after(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The Transformers config of the student."""
        from distill.student import student_config

        return config_with_few(student_config(self.student, config, f"{self.key}.student"), self)

    def check(self, config: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context) -> None:
        """Checks, before the first stage runs, that student, teacher and losses fit each other and the task.

        Raises:
            InputError: They do not fit.
        """
        from distill.labeller import goal
        from distill.student import check_student, student_config
        from foundation.models.config import check_length
        from foundation.training.allowed import check_training
        from foundation.training.supervised import check_known, check_labelled

        if context.facts.answer.PER_TOKEN and self.student.path is not None:
            given = f"{self.student.path} given"
            raise InputError(f"{self.key}.student.path", given, f"{context.task} keeps the tokens of the incoming model")
        if self.sequences is not None and not context.facts.generates:
            tasks = tasks_with(lambda row: row.generates)
            raise InputError(f"{self.key}.sequences", f"given for {context.task}", f"it is for {tasks}", "leave it out")
        if self.sequences is not None and "prompt" in self.sequences.model_fields_set and context.facts.encoder_decoder:
            raise InputError(
                f"{self.key}.sequences.prompt",
                f"{self.sequences.prompt:g} given",
                f"the sources of {context.task} are given whole",
                "leave it out",
            )
        if self.on_policy is not None and not context.facts.generates:
            tasks = tasks_with(lambda row: row.generates)
            raise InputError(f"{self.key}.on_policy", f"given for {context.task}", f"it is for {tasks}", "leave it out")
        if self.on_policy is not None and context.team.runs_together:
            divides = f"parallel: {{{context.team.settings}}}, which divides the student"
            raise InputError(f"{self.key}.on_policy", f"given with {divides}", remedy="give parallel: {strategy: ddp}")
        if self.augment is not None and context.team.pipeline > 1:
            given = f"given with parallel.pipeline: {context.team.pipeline}, whose stages read the rows before they are masked"
            raise InputError(f"{self.key}.augment", given, remedy="give pipeline: 1, or remove augment")
        if context.data.train.together > 1:
            self._check_parted(context.task)
        if context.facts.embeds:
            self._check_vectors(context.task)
        self._check_rows(context)
        self._check_answers()
        if self.labeller is not None:
            goal.check(self.labeller, context, self.teacher_key)
        num_labels = num_classes(context.task, context.data.labels)
        check_student(self.student, context, num_labels, f"{self.key}.student")
        after = self.config_after(config)
        if self.labeller is not None:  # its targets are of the student's classes
            teacher = after
        check_training(self, after, context, self.key)
        if context.facts.modality == "text":
            check_length(after, context.max_length)
        if not self.resolved().losses:
            check_labelled(context.task, context.data, self.key)
        if self.hard_weight:
            check_known(context.data, f"{self.key}.hard_weight", "leave it out")
        check_few(self, student_config(self.student, config, f"{self.key}.student"), context)
        joins = self._joins_micro_batches(self.plan.settings(after, teacher, context), context.task)
        self.plan.check(after, teacher, context, None if joins else self.micro_batch_size)

    def _joins_micro_batches(self, settings: Sequence[Setting], task: Task) -> bool:
        """Whether rows of several micro-batches can be compared (`foundation.training.grad_cache`).

        All losses have to read only the vectors, and to train nothing else.
        """
        from foundation.models.meta import on_meta_device

        facts, losses = TASKS[task], self.resolved().losses
        if not facts.embeds_texts or not all(loss.ANSWERS_ONLY for loss in losses):
            return False
        with on_meta_device():
            built = [loss.build(setting) for loss, setting in zip(losses, settings, strict=True)]
        return not any(list(module.parameters()) for module in built if module is not None)

    def _check_rows(self, context: Context) -> None:
        """Raises if extra rows do not fit the data of the run."""
        given = [name for name in ("extra_text", "augment", "corpus") if getattr(self, name) is not None]
        if given and (context.facts.modality != "text" or context.facts.answer.PER_TOKEN):
            raise InputError(f"{self.key}.{given[0]}", "given", f"{context.task} does not support it", f"remove {given[0]}")
        pairs = isinstance(context.data.train.rows[0], tuple)
        if self.extra_text is not None and (self.extra_text.text_pair is not None) != pairs:
            kind, remedy = ("pairs of texts", "give") if pairs else ("single texts", "remove")
            raise InputError(f"{self.key}.extra_text", f"the rows of the data are {kind}: {remedy} {self.key}.extra_text.text_pair")
        if self.corpus is not None and self.corpus.text_pair is not None:
            raise InputError(
                f"{self.key}.corpus.text_pair", f"{self.corpus.text_pair!r} given", "a corpus is plain text", "remove text_pair"
            )

    def _check_answers(self) -> None:
        """Raises if losses need the internals of several teachers, or logits on a corpus."""
        from foundation.stage.stage import teachers_named
        from foundation.training.losses.distillation.presets import PRESETS

        losses = self.losses or PRESETS[self.loss or "soft_target"].losses
        internal = [loss.name for loss in losses if not loss.ANSWERS_ONLY]
        count = len(teachers_named(self))
        if count > 1 and internal:
            raise InputError(
                self.teacher_key,
                f"{count} given",
                f"{internal[0]} needs more than logits and works with one",
                "give one teacher, or loss: soft_target",
            )
        if self.labeller is not None and internal:
            raise InputError(self.teacher_key, "a labeller given", f"{internal[0]} needs more than logits", "give loss: soft_target")
        if self.corpus is None:
            return
        on_logits = [loss.name for loss in self.losses if loss.COMPARES_ANSWERS]
        if on_logits or not self.resolved().losses:
            name = on_logits[0] if on_logits else self.loss or "soft_target"
            raise InputError(
                f"{self.key}.corpus",
                f"given, but {name} compares logits",
                "a corpus needs losses on hidden states or attention",
                "give loss: minilmv2, minilm, tinybert, distilbert, pkd or relational",
            )

    def _check_parted(self, task: Task) -> None:
        """Raises if rows of a task that are learned together would be parted."""
        given = [name for name in ("extra_text", "augment") if getattr(self, name) is not None]
        given += ["fraction"] if self.fraction != 1 and self.corpus is None else []
        if given and not TASKS[task].embeds:
            raise InputError(
                f"{self.key}.{given[0]}",
                "given",
                f"the rows of {task} are candidates of queries, which it would part",
                f"remove {given[0]}",
            )

    def _check_vectors(self, task: Task) -> None:
        """Raises if rows do not support a task whose answers are vectors of texts that come in pairs."""
        given = [name for name in ("extra_text", "augment", "corpus") if getattr(self, name) is not None]
        given += ["fraction"] if self.fraction != 1 else []
        if given:
            raise InputError(
                f"{self.key}.{given[0]}", "given", f"the rows of {task} are texts of pairs, which it would part", f"remove {given[0]}"
            )

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, object]:
        """Trains the student and writes it as a checkpoint.

        Returns:
            `losses` per epoch, `selection` (metric, values, best step), `steps`, `seconds_per_step`, `autocast`, `rows`,
            `labelled_rows`, `teacher`, `teacher_logits` (cached or live), and `labeller` where there is one.

        Raises:
            InputError: Student, teacher or losses do not fit each other, or the loss became NaN or infinite.
        """
        from distill.steps import Steps
        from distill.student import build
        from foundation.machine.device import computing_device
        from foundation.models.checkpoint import save
        from foundation.training.selection import selection_metric
        from foundation.training.thresholds import fit_null_threshold
        from foundation.training.train import TrainConfig, Training, train

        device, team = computing_device(), context.team
        student, source = build(self.student, parent.path, context, f"{self.key}.student")
        steps = Steps(self, source, context)
        folders = [steps.teacher_folder(number) for number in range(len(context.teachers))]
        if self.sequences is not None:
            context = self._with_answers(context, folders[0], device)
        if not team.shards:  # with fsdp2, `train` moves the student to the device block by block
            student.to(device)
        with training_few(student, self, source, context) as few:
            source = few.source
            steps, prepared = Steps(self, source, context), context.preprocessor(source)
            taught = self.labeller is None
            lesson = steps.from_teachers(student, prepared, folders, device) if taught else steps.from_labeller(student, prepared)
            training = Training.of(
                context,
                prepared,
                TrainConfig.of(self),
                self.title,
                split=lesson.split,
                select=selection_metric(lesson.judged, prepared) if self.corpus is None else None,
                depends={"stage": self.model_dump(mode="json"), "teachers": lesson.sources},
            )
            history = train(student, lesson.objective.to(device), training)
        fit_null_threshold(student, prepared, lesson.judged)
        if team.is_first:
            note = f"Distilled for {history.steps} steps of {self.batch_size} rows, peak learning rate {self.learning_rate:g}"
            save(student.cpu(), source, out, note)
            lesson.save(out)
        return self._figures(history, steps, lesson)

    def _with_answers(self, context: Context, folder: Path, device: torch.device) -> Context:
        """Returns the context with the answers of the first teacher as targets of the train split."""
        from distill.sequences import with_answers
        from foundation.models.checkpoint import load

        assert self.sequences is not None
        name, teacher = context.teachers[0].digest, load(folder, device)
        train = with_answers(context.data.train, teacher, self.sequences, context.max_length, context.scratch, name, context.progress)
        return replace(context, data=replace(context.data, train=train))

    def _figures(self, history: History, steps: Steps, lesson: Lesson) -> dict[str, object]:
        """Returns the figures of `run`."""
        metric = steps.context.facts.metric + (" against the teacher" if lesson.by_agreement else "")
        return {
            "losses": history.losses,
            "selection": {"metric": metric, "values": history.selection, "best_step": history.best_step},
            "steps": history.steps,
            "seconds_per_step": history.seconds / max(1, history.steps),
            "autocast": history.autocast,
            **history.of_experts,
            "rows": len(lesson.split),
            "labelled_rows": lesson.num_labelled,
            "teacher": lesson.teacher,
            "teacher_logits": "cached" if lesson.cached else "live",
            **lesson.figures,
        }
