"""Data for speech-recognition: sounds with the texts that are spoken in them (`foundation.labels.transcripts`).

The vocabulary comes from the model, or for a new head from the characters of the train split after the blank, the token for unknown
characters and the one between words. White space of any kind and length is one space. If a model writes in capitals or in small letters
alone, texts are brought to that case.

Characters that the vocabulary lacks are not learned, and count as wrong where they are in a text. The log says how many there are. If they
are more than half, the texts do not belong to the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from compress.reading.sources import Source, read_sources, repeats_of
from foundation.core.errors import InputError, Problem
from foundation.core.shown import shown
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split, divide, with_test
from foundation.labels.tasks import Task
from foundation.labels.transcripts import labels_of
from foundation.models.heads.transcriber import vocabulary_of_texts
from foundation.standalone.response import DELIMITER

MOST_UNKNOWN = 0.5
MOST_CHARACTERS = 100_000
"""Most characters of one text."""
Log = Callable[[str], None]


def load_transcripts(config: DataConfig, task: Task, label_names: tuple[str, ...] | None, log: Log) -> Data:
    """Reads the data of a recipe whose sounds have texts.

    Args:
        config: The data section.
        task: A task that transcribes.
        label_names: The vocabulary if the model determines it; None takes it from the train split.
        log: Receives messages about what was found and decided.

    Raises:
        InputError: The files cannot be read, a text is missing, or the texts are not written in the vocabulary.
    """
    sources = read_sources(config, task, log)
    texts = {name: _texts(found) for name, found in sources.items()}
    names = label_names or vocabulary_of_texts(text for text, _ in texts["train"])
    if label_names is not None:
        texts = _in_case(texts, names, log)
    origin = "the model" if label_names else "the train split"
    splits = {name: _split(name, sources[name], found, (names, origin), log) for name, found in texts.items()}
    with_test(splits, config.path, log)
    return divide(
        splits["train"], splits.get("test"), splits.get("validation"), names, f"data.path {config.path}", log, config.keep_evaluation_rows
    )


def _texts(sources: Sequence[Source]) -> list[tuple[str, str]]:
    """Returns the text of each sound with single spaces, and its place."""
    found, problems = [], list[Problem]()
    for source in sources:
        for number, label in enumerate(source.labels):
            text, place = " ".join(label.split()) if isinstance(label, str) else "", source.place(number)
            if not text:
                problems.append(Problem(place, f"{shown(label)} given as the text of a sound", "the words that are spoken are needed"))
            elif DELIMITER in text or not text.isprintable() or len(text) > MOST_CHARACTERS:
                allowed = f"at most {MOST_CHARACTERS} characters without control characters and {DELIMITER}, which stands between words"
                problems.append(Problem(place, f"the text {shown(text)}", f"{allowed}, are allowed"))
            found.append((text, place))
    if problems:
        more = [Problem(sources[0].name, f"{len(problems) - 3} more texts like these")] if len(problems) > 3 else []
        raise InputError.of(problems[:3] + more)
    return found


def _in_case(texts: dict[str, list[tuple[str, str]]], names: Sequence[str], log: Log) -> dict[str, list[tuple[str, str]]]:
    """Returns the texts in the case of a vocabulary with only one case."""
    letters = [name for name in names if len(name) == 1 and name.lower() != name.upper()]
    for change, word in ((str.upper, "capitals"), (str.lower, "small letters")):
        if letters and all(change(name) == name for name in letters):
            made = {name: [(change(text), place) for text, place in found] for name, found in texts.items()}
            if made != texts:
                log(f"data: the model writes in {word} alone; the texts are brought to them")
            return made
    return texts


def _split(
    name: str, sources: Sequence[Source], texts: Sequence[tuple[str, str]], vocabulary: tuple[tuple[str, ...], str], log: Log
) -> Split:
    """Returns a split; `vocabulary` is that and where it comes from."""
    names, origin = vocabulary
    rows: list[Any] = [row for source in sources for row in source.rows]
    counts = Counter(character for text, _ in texts for character in text)
    unknown = {character: count for character, count in counts.items() if character != " " and character not in names}
    lost, whole = sum(unknown.values()), sum(counts.values())
    most = ", ".join(sorted(unknown, key=lambda character: -unknown[character])[:5])
    if lost > MOST_UNKNOWN * whole:
        raise InputError(
            sources[0].name,
            f"{lost} of {whole} characters of the texts are not in the vocabulary of {origin} ({most}, ...)",
            remedy="give texts in its writing, or model.head: new",
        )
    told = f"; {lost} of them are not in the vocabulary ({most}): not learned, and counted as wrong" if lost else ""
    log(f"data: {name}: {len(rows)} sounds, {whole} characters{told}")
    return Split(rows, labels_of([text for text, _ in texts], names), repeats=repeats_of(sources))
