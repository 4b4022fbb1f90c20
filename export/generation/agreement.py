"""Whether an engine that generates gives the tokens of torch, and how far its answers are from the float baseline's.

Before an engine is taken, its greedy answers to prompts from selection rows have to equal the answers of the same checkpoint in torch
(`foundation.measure.tokens`): prompts of several lengths at once, some longer than what is read in one step. Of an engine that is taken,
the answers to prompts from evaluation rows, or to questions, are kept and compared with the baseline in torch: what compression did to the
answers. Where they have references, BLEU and chrF measure them.

Torch, which takes longer than an engine, answers `OWN_PROMPTS` of the evaluation prompts with a compressed checkpoint, and all of them with
the baseline: of the same checkpoint the gate has already compared answers, on selection rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from export.choices import Generation
from export.generation.prompts import Prompts, Tokens, greedy
from export.generation.questions import KEY
from export.generation.rereading import original_positions
from export.generation.translations import quality
from export.parity.gate import Gate
from export.parity.own_rounding import Rounding, fewer_than_chance
from export.parity.rows import GATE_PROMPTS, GATE_TOKENS, OWN_PROMPTS, gate_rows
from export.parity.torch_models import TorchModels, Way, distinct
from foundation.artifacts import exported, figures
from foundation.core.decoding import Decoding
from foundation.core.engines import REFERENCE
from foundation.core.errors import InputError
from foundation.data.groups import groups_of_rows
from foundation.measure.engine_process import EngineProcess
from foundation.measure.tokens import ENDED, compare_tokens, filled, save_answers, token_shortfall
from foundation.models.config import most_tokens
from foundation.models.folder import Checkpoint
from foundation.models.inputs.questions import read_questions
from foundation.stage.context import Context

Asked = Literal["gate", "evaluation", "some of evaluation"]
"""Prompts that torch answers."""
SERVED_PROMPTS = 8
"""Prompts of several lengths that the server is asked at once."""


class Agreement:
    """The prompts and rows of the gates, and what torch answers to them: once for each checkpoint and way of computing it."""

    def __init__(self, context: Context, settings: Generation) -> None:
        self._context, self.settings = context, settings
        self._models = TorchModels()
        self._known: dict[tuple[Checkpoint, Way, Asked], Tokens] = {}

    @cached_property
    def predictions(self) -> Gate:
        """The gate of predictions, which comes first."""
        return Gate(self._context, self._models)

    def gate(
        self, process: EngineProcess, checkpoint: Checkpoint, *, rounding: Rounding | None, amplifies: bool = False
    ) -> tuple[figures.Tokens, str | None]:
        """Compares an engine with torch on selection rows.

        Args:
            process: The engine, open.
            checkpoint: The checkpoint that it was built from.
            rounding: How the engine quantizes tokens by itself, if it does: it may then be as far from the model with float activations
                as torch is (`export.parity.own_rounding`).
            amplifies: Whether the checkpoint amplifies rounding (`export.parity.amplified`): the same then holds for every engine.

        Returns:
            The comparison, and why the engine does not pass, or None.
        """
        expected = self._in_torch(checkpoint, rounding if rounding is not None and rounding.exact else "integers")
        found = self._answer(process, self._gate_prompts)
        compared = figures.Tokens(**compare_tokens(expected, found))
        long = list(self._gate_prompts.long)
        for places in ([*range(len(found))], *([long] if long else ())):  # long ones on their own: few would be lost among many
            reason = token_shortfall(compare_tokens(expected[places], found[places]), REFERENCE)
            if reason is not None and (rounding is not None or amplifies):
                own = expected if rounding is None else self._in_torch(checkpoint, rounding)
                reason = fewer_than_chance(self._in_torch(checkpoint, "float")[places], own[places], found[places])
            if reason is not None:
                about = f", of {len(long)} prompts of {self._longest_prompt} tokens and fewer" if places is long else ""
                return compared.with_(passed=False), f"{reason}{about}"
        return compared.with_(passed=True), None

    @property
    def _longest_prompt(self) -> int:
        return max(len(row) for row in self._gate_prompts.rows)

    def answered(self, process: EngineProcess) -> Tokens:
        """Returns the greedy answers of an engine to the prompts from evaluation rows, or to questions, int32 [n, T]."""
        return self._answer(process, self._evaluation_prompts)

    def evaluate(self, process: EngineProcess, checkpoint: Checkpoint, path: Path) -> exported.Generation:
        """Answers prompts from evaluation rows, writes them to `path`, and compares them with the baseline and the checkpoint in torch.

        Answers to some prompts of the gate, of several lengths, are stored next to them in the file: the server answers both.
        """
        prompts = self._evaluation_prompts
        found = self.answered(process)
        original = Checkpoint(self._context.baseline.path)
        baseline = self._in_torch(original, "integers", "evaluation")
        own, places = baseline, list(range(len(found)))
        if checkpoint != original:
            own, places = self._in_torch(checkpoint, "integers", "some of evaluation"), self._own_places
        save_answers(path, prompts.rows, found, self._served_answers(process))
        compared = exported.Generation(
            prompt_tokens=int(np.median([len(row) for row in prompts.rows])),
            questions=prompts.questions,
            baseline=figures.Tokens(**compare_tokens(baseline, found)),
            torch=figures.Tokens(**compare_tokens(own, found[places])),
        )
        if not prompts.references:
            return compared
        texts, references, before = (self._texts(rows) for rows in (found, prompts.references, baseline))
        return compared.with_(quality=quality(texts, references, before, groups_of_rows([row.tobytes() for row in prompts.rows])))

    def _served_answers(self, process: EngineProcess) -> tuple[tuple[Tokens, ...], Tokens] | None:
        prompts = self._served_prompts
        return None if prompts is None else (prompts.rows, self._answer(process, prompts))

    def _texts(self, rows: Iterable[Tokens]) -> list[str]:
        """Returns the texts of answers, without special tokens."""
        tokenizer = self._context.preprocessor(self._context.baseline.path).tokenizer
        assert tokenizer is not None, "a text preprocessor has a tokenizer"
        return [tokenizer.decode(row[row != ENDED].tolist(), skip_special_tokens=True) for row in rows]

    @cached_property
    def _gate_prompts(self) -> Prompts:
        most = {"prompts": min(GATE_PROMPTS, self.settings.prompts), "tokens": min(GATE_TOKENS, self.settings.tokens)}
        settings = self.settings.model_copy(update=most)
        rows = gate_rows(self._context.data).rows
        prompts, config = Prompts.of_rows(rows, settings, self._context.max_length), Checkpoint(self._context.baseline.path).config
        if prompts.references:  # sources, which have lengths of their own
            return prompts
        return prompts.mixed(rows, most_tokens(config.get_text_config()), original_positions(config.get_text_config()))

    @property
    def _served_prompts(self) -> Prompts | None:
        """Prompts of several lengths for the server, which it is asked at once; None for sources."""
        prompts = self._gate_prompts
        return None if prompts.references else Prompts(prompts.rows[:SERVED_PROMPTS], prompts.tokens)

    @cached_property
    def _evaluation_prompts(self) -> Prompts:
        if self.settings.questions is None:
            return Prompts.of_rows(self._context.data.evaluation.rows, self.settings, self._context.max_length)
        baseline = Checkpoint(self._context.baseline.path)
        longest = most_tokens(baseline.config)
        return Prompts.of_questions(read_questions(self.settings.questions, KEY), self.settings, baseline, longest)

    @cached_property
    def _own_places(self) -> list[int]:
        """Which evaluation prompts a compressed checkpoint answers in torch: evenly spaced."""
        count = len(self._evaluation_prompts.rows)
        return [int(place) for place in np.unique(np.linspace(0, count - 1, min(OWN_PROMPTS, count)).round())]

    def _prompts(self, asked: Asked) -> Prompts:
        if asked == "gate":
            return self._gate_prompts
        prompts = self._evaluation_prompts
        if asked == "evaluation":
            return prompts
        rows, references = (tuple(of[place] for place in self._own_places) if of else () for of in (prompts.rows, prompts.references))
        return replace(prompts, rows=rows, references=references)

    def _in_torch(self, checkpoint: Checkpoint, way: Way, asked: Asked = "gate") -> Tokens:
        """Returns the greedy answers of torch to the prompts of the gate, or from evaluation rows.

        Args:
            checkpoint: The checkpoint.
            way: How torch computes it.
            asked: Which prompts.

        Raises:
            InputError: The model does not fit into memory.
        """
        way = distinct(checkpoint, way)
        if (checkpoint, way, asked) not in self._known:
            self._require_memory(checkpoint)
            prompts = self._prompts(asked)
            total = len(prompts.rows) * prompts.tokens
            with self._models.open(checkpoint, way) as model, self._context.progress.bar("    torch: tokens", total) as advance:
                self._known[checkpoint, way, asked] = greedy(model, prompts, advance)
        return self._known[checkpoint, way, asked]

    def _answer(self, process: EngineProcess, prompts: Prompts) -> Tokens:
        name, total = process.job.labels["engine"], len(prompts.rows) * prompts.tokens
        with self._context.progress.bar(f"    {name}: tokens", total) as advance:
            return answer(process, prompts, advance)

    def _require_memory(self, checkpoint: Checkpoint) -> None:
        """Raises InputError where a checkpoint does not fit into memory."""
        from foundation.measure.predictions import predicts_streamed

        if predicts_streamed(checkpoint.folder, self._context.task):
            raise InputError(checkpoint.folder.name, "too large to answer in torch here", remedy="use a machine with more memory")


def answer(process: EngineProcess, prompts: Prompts, advance: Callable[[int], None] | None = None) -> Tokens:
    """Returns the greedy tokens of an engine, int32 [n, T]; `ENDED` after an answer that ends.

    Args:
        process: The engine, open.
        prompts: The prompts.
        advance: Called with the number of tokens that came.
    """
    on_tokens = None if advance is None else lambda _, tokens: advance(len(tokens))
    answers = process.generate(list(prompts.rows), Decoding(max_tokens=prompts.tokens, ignore_end=not prompts.ends), on_tokens)
    return filled([one.tokens[0] for one in answers], prompts.tokens)
