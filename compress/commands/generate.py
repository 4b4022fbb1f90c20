"""`compress generate`: a variant of a run answers prompts, token by token, in one of its engines.

    prompt -> (chat template) -> tokenizer.json -> engine in a process of its own -> text as it comes

A prompt goes through the chat template where the tokenizer has one, as the only message of a user. With `--compare` two variants or engines
answer the same prompt, one after the other, and their answers are printed side by side.

A search with beams may give several answers (`--answers`), best first, with a line between them.

With `--draft` or `--prompt-lookup` tokens are proposed to what answers first (`foundation.core.speculation`); the last line says how many
it took.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compress.commands.options import AnswerOptions
from compress.report import evaluations
from compress.run.opened import opened
from foundation.artifacts.run_folder import Run
from foundation.core.decoding import Answer, Decoding
from foundation.core.engines import ENGINES, REFERENCE
from foundation.core.errors import InputError, nearest
from foundation.core.named import one_of
from foundation.core.speculation import PROPOSED_MODE, Speculation, per_step
from foundation.core.target import Target
from foundation.labels.tasks import TASKS, tasks_with
from foundation.measure.engine_process import EngineProcess
from foundation.models.config import most_tokens
from foundation.models.folder import Checkpoint
from foundation.models.inputs.language import language_text
from foundation.models.inputs.questions import encode_question
from foundation.models.inputs.vocabulary import other_tokens
from foundation.schemes.table import SCHEMES
from foundation.standalone.pieces import Pieces

if TYPE_CHECKING:
    from export.engines.spec import EngineSpec

Write = Callable[[str], None]
GAP = 4
"""Columns between two answers."""
BETWEEN = "\n---\n"
"""Stands between the answers of one search."""


@dataclass(frozen=True)
class Choice:
    """The model that answers: a variant of the run in one engine."""

    variant: str
    precision: str
    engine: str
    checkpoint: Path
    spec: EngineSpec
    """What to open."""
    proposing: str = ""
    """Name of the source of proposed tokens, for the title."""

    @property
    def names(self) -> tuple[str, str]:
        """Names that the user may give for it."""
        return self.variant, f"{self.variant}-{self.precision}"

    @property
    def title(self) -> str:
        """How it is shown."""
        mode = "" if self.engine == REFERENCE else f" {self.spec.mode}"
        floating = "" if self.precision == self.spec.float_precision else f", rest {self.spec.float_precision}"
        return f"{self.variant} ({self.precision}{floating}, {ENGINES[self.engine].title}{mode}{self.proposing})"


@dataclass
class Reply:
    """The answer to one prompt as text, and its time."""

    text: str
    """The answer; of a search all that were asked, best first."""
    answer: Answer
    prompt_tokens: int
    decoding: Decoding = field(repr=False)

    def summary(self) -> str:
        """Returns tokens and times in one line."""
        seconds, count = self.answer.seconds, len(self.answer.tokens[0])
        line = f"{self.prompt_tokens} tokens in, {' and '.join(str(len(one)) for one in self.answer.tokens)} out"
        if not seconds:
            return line
        rate = f", then {(count - 1) / (seconds[-1] - seconds[0]):.1f} tokens/s" if count > 1 and seconds[-1] > seconds[0] else ""
        return f"{line}; first after {1e3 * seconds[0]:.0f} ms{rate}{self._accepted()}"

    def _accepted(self) -> str:
        if not self.answer.proposed:
            return ""
        steps = per_step(len(self.answer.tokens[0]), self.answer.accepted)
        return f"; {self.answer.accepted} of {self.answer.proposed} proposed tokens accepted, {steps:.2f} tokens per step"


class Answerer:
    """An open engine with its tokenizer; a context manager."""

    def __init__(self, choice: Choice, chat: bool) -> None:
        """Opens the engine.

        Args:
            choice: What answers.
            chat: Whether prompts go through the chat template, if there is one.

        Raises:
            EngineError: The engine could not be opened.
        """
        self.choice = choice
        self._text = language_text(choice.checkpoint)
        self._chat = chat
        config = Checkpoint(choice.checkpoint).config
        self._longest, self._encodes = most_tokens(config), bool(config.is_encoder_decoder)
        self._process = EngineProcess(choice.spec)

    def ids(self, prompt: str, tokens: int) -> NDArray[np.int32]:
        """Returns the token ids of a prompt.

        Args:
            prompt: The text.
            tokens: Most tokens of the answer.

        Raises:
            InputError: The prompt has no token, or there is no room for it and its answer in what the model reads.
        """
        found = encode_question(self._text, prompt, chat=self._chat)
        if not len(found):
            raise InputError("--prompt", "no token in it", remedy="give at least one character")
        together = 0 if self._encodes else tokens  # an encoder-decoder reads the prompt and its answer apart
        if self._longest is not None and max(len(found) + together, tokens) > self._longest:
            read = "of each" if self._encodes else "in all"
            raise InputError(
                "--prompt", f"{len(found)} tokens and --max-tokens {tokens} given", f"the model reads {self._longest} {read}", "give fewer"
            )
        return found

    def answer(self, prompt: str, decoding: Decoding, write: Write | None = None) -> Reply:
        """Answers one prompt.

        Args:
            prompt: The text.
            decoding: How tokens are chosen.
            write: Takes the text in pieces, as it comes.
        """
        ids, stream, text = (
            self.ids(prompt, decoding.max_tokens),
            Pieces(self._text.decode, self._text.held_letters, decoding.stop),
            list[str](),
        )

        def write_tokens(_: int, tokens: Sequence[int]) -> None:
            take(stream.add([token]) for token in tokens)

        def take(pieces: Iterable[str]) -> None:
            for piece in filter(None, pieces):
                text.append(piece)
                if write is not None:
                    write(piece)

        (found,) = self._process.generate([ids], decoding, write_tokens if decoding.beams == 1 else None)
        if decoding.beams == 1:
            take([stream.end()])
        else:
            take([BETWEEN.join(self._text.decode(one) for one in found.tokens)])
        return Reply("".join(text), found, len(ids), decoding)

    def __enter__(self) -> Answerer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.__exit__(kind, error, trace)


def generate(
    folder: Path,
    prompts: Iterator[str],
    decoding: Decoding,
    wanted: AnswerOptions,
    *,
    write: Write,
    note: Write,
) -> None:
    """Answers prompts.

    Args:
        folder: A finished run of a language model.
        prompts: The texts.
        decoding: How tokens are chosen.
        wanted: What answers.
        write: Takes the answer in pieces.
        note: Takes whole lines about it.

    Raises:
        InputError: The run is no language model, or nothing of that name answers.
        EngineError: An engine failed.
    """
    known = choices(opened(folder))
    first = chosen(known, wanted.variant, wanted.engine)
    second = None if wanted.compare is None else _compared(known, first, wanted.compare)
    first = proposed_to(first, known, wanted, decoding)
    _check_stop_tokens(first, decoding)
    with ExitStack() as stack:
        answerer = stack.enter_context(Answerer(first, wanted.chat))
        if second is None:
            for prompt in prompts:
                note(first.title)
                told = answerer.answer(prompt, decoding, write)
                write("\n")
                note(told.summary())
            return
        other = stack.enter_context(Answerer(second, wanted.chat))
        for prompt in prompts:
            answers = [one.answer(prompt, decoding) for one in (answerer, other)]
            width = (shutil.get_terminal_size().columns - GAP) // 2
            headings = [one.choice.title for one in (answerer, other)]
            for line in side_by_side(headings, [told.text for told in answers], [told.summary() for told in answers], width):
                write(line + "\n")
            note(_difference([told.answer.tokens[0] for told in answers]))


def _check_stop_tokens(choice: Choice, decoding: Decoding) -> None:
    """Raises InputError where the model has no such token, which would never end an answer."""
    size = int(Checkpoint(choice.checkpoint).config.get_text_config().vocab_size)
    unknown = [token for token in decoding.stop_tokens if token >= size]
    if unknown:
        raise InputError(f"--stop-token {unknown[0]}", "no such token", f"0 to {size - 1} is allowed")


def choices(run: Run) -> list[Choice]:
    """Returns the choices of a run: the engines of its builds that generate, then every variant in torch.

    Raises:
        InputError: The run is no language model.
    """
    from export.engines.spec import spec_of, torch_spec

    task = run.recipe["model"]["task"]
    if not TASKS[task].generates:
        raise InputError(f"{run.folder}", f"a run of {task}", f"generate is for {tasks_with(lambda row: row.generates)}")
    target, found = Target(**run.recipe["target"]), []
    exported = run.of_kind("engine")
    entries = [(build, entry) for build in evaluations.exported(run).builds for entry in build.engines if entry.runnable]
    for made, entry in entries:
        if exported is not None and ENGINES[entry.engine].generates:
            spec = spec_of(exported.path, made, entry, target)
            found.append(Choice(made.variant, made.precision, entry.engine, run.variants[made.variant].path, spec))
    for variant, artifact in run.variants.items():
        scheme = Checkpoint(artifact.path).scheme
        stored = "fp32" if scheme is None else "int8"  # int8: quantized as it is
        spec = torch_spec(Checkpoint(artifact.path), artifact.path, stored, target)
        found.append(Choice(variant, "fp32" if scheme is None else SCHEMES[scheme].precision, REFERENCE, artifact.path, spec))
    order = list(run.variants)
    return sorted(found, key=lambda choice: (choice.engine == REFERENCE, order.index(choice.variant)))


def chosen(known: Sequence[Choice], variant: str | None, engine: str | None, option: str = "--variant") -> Choice:
    """Returns the choice that the user names.

    Args:
        known: What `choices` gave.
        variant: A variant; None: the last one that the engine has.
        engine: An engine; None: the first one that has the variant.
        option: What the variant was given with, for messages.

    Raises:
        InputError: Nothing has that name.
    """
    names = list(dict.fromkeys(name for choice in known for name in choice.names))
    if variant is not None and variant not in names:
        raise InputError(f"{option} {variant}", "no such variant", f"{one_of(names)} is allowed{nearest(variant, names)}")
    engines = list(dict.fromkeys(choice.engine for choice in known))
    if engine is not None and engine not in engines:
        raise InputError(
            f"--engine {engine}", "nothing of this run answers in it", f"{one_of(engines)} is allowed", "put others into target.engines"
        )
    fitting = [choice for choice in known if variant in (None, *choice.names) and engine in (None, choice.engine)]
    if not fitting:
        raise InputError(
            f"{option} {variant} --engine {engine}", "this variant was not built for this engine", remedy="leave one of them out"
        )
    preferred = [choice for choice in fitting if choice.engine == fitting[0].engine]
    last = preferred[-1].variant
    return next(choice for choice in preferred if choice.variant == last)  # of a variant the recommended engine comes first


def _compared(known: Sequence[Choice], first: Choice, name: str) -> Choice:
    """Returns the model to compare with the first one: a variant in the same engine, or the same variant in another engine."""
    if name in {choice.engine for choice in known}:
        return chosen(known, first.variant, name)
    built = any(choice.engine == first.engine and name in choice.names for choice in known)
    return chosen(known, name, first.engine if built else None, "--compare")


def proposed_to(first: Choice, known: Sequence[Choice], wanted: AnswerOptions, decoding: Decoding) -> Choice:
    """Returns the choice with its draft model or prompt lookup, if one was requested.

    Raises:
        InputError: It cannot take proposals, or what was named cannot propose.
    """
    if wanted.draft is None and wanted.prompt_lookup is None:
        return first
    option = "--prompt-lookup" if wanted.draft is None else "--draft"
    if wanted.draft is not None and wanted.prompt_lookup is not None:
        raise InputError("--draft, --prompt-lookup", "both given", "one of them proposes tokens", "leave the other out")
    if not ENGINES[first.engine].proposed_to:
        others = one_of([name for name, row in ENGINES.items() if row.proposed_to])
        raise InputError(
            option, f"{first.title} answers", f"tokens can be proposed in {others}", "give --engine, or put it into target.engines"
        )
    if first.spec.mode != PROPOSED_MODE:
        raise InputError(option, f"{first.title} answers", f"tokens can be proposed in {PROPOSED_MODE} mode alone", "leave it out")
    if wanted.draft is None:
        speculation, title = Speculation(wanted.prompt_lookup or 0), "looking the prompt up"
    else:
        draft = _draft(wanted.draft, known, first)
        speculation = Speculation(wanted.draft_tokens, draft.spec.path, draft.spec.properties)
        title = f"draft {draft.variant} {draft.precision}"
    speculation.check(decoding)
    return replace(first, spec=replace(first.spec, speculation=speculation), proposing=f", {title}")


def _draft(name: str, known: Sequence[Choice], first: Choice) -> Choice:
    """Returns the variant, or the last variant of the run in a folder, that proposes tokens."""
    names = list(dict.fromkeys(name for choice in known for name in choice.names))
    if name not in names and not Path(name).is_dir():
        raise InputError(f"--draft {name}", "no variant and no folder of a run", f"{one_of(names)} is allowed{nearest(name, names)}")
    offered = [one for one in (known if name in names else choices(opened(Path(name)))) if name not in names or name in one.names]
    fitting = [one for one in offered if one.engine == first.engine and one.spec.mode == PROPOSED_MODE]
    if not fitting:
        raise InputError(
            f"--draft {name}", f"it was not built for {first.engine} in {PROPOSED_MODE} mode, in which {first.variant} answers"
        )
    last = fitting[-1].variant
    draft = next(one for one in fitting if one.variant == last)
    difference = other_tokens(first.checkpoint, draft.checkpoint)
    if difference is not None:
        raise InputError(f"--draft {name}", f"{difference} in {first.variant}", remedy="give a draft with the same tokenizer")
    return draft


def side_by_side(headings: Sequence[str], texts: Sequence[str], feet: Sequence[str], width: int) -> list[str]:
    """Returns two texts in columns, with a line above and below each.

    Args:
        headings: A line for each.
        texts: The texts.
        feet: A line for each.
        width: Characters of a column.
    """
    columns = []
    for heading, text, foot in zip(headings, texts, feet, strict=True):
        body = [part for line in text.splitlines() or [""] for part in textwrap.wrap(line, width) or [""]]
        columns.append([*textwrap.wrap(heading, width), "-" * width, *body, "-" * width, *textwrap.wrap(foot, width)])
    return [f"{left:<{width}}{' ' * GAP}{right}".rstrip() for left, right in zip_longest(*columns, fillvalue="")]


def _difference(answers: Sequence[Sequence[int]]) -> str:
    first, second = answers
    equal = next((at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), min(len(first), len(second)))
    if equal == len(first) == len(second):
        return f"all {equal} tokens are equal"
    return f"the first {equal} tokens are equal"
