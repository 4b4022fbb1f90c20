"""Loads the data of a run.

`load_data` turns the data section of a recipe into a `Data`: it finds and reads the files (`sources`), converts labels to class ids or
values (`labels`), or sets of class ids (`label_sets`), and splits the rows into train, selection and evaluation (`splits`). For
text-generation, text is cut into blocks of tokens instead (`text_blocks`), for text-to-text into pairs of tokens (`text_pairs`). Sentences
whose words have tags are read by `tagged`, sounds with the texts that are spoken by `transcripts`, questions with windows of their contexts
by `questions`. Tasks that search documents read the layout of BEIR (`judged_texts`), or with candidates of each query (`candidate_pairs`).
Images with captions are read by `captioned_images`, and pairs and triplets of sentences by `sentence_pairs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from compress.reading import label_sets, labels
from compress.reading.candidate_pairs import load_candidates
from compress.reading.captioned_images import load_captioned
from compress.reading.judged_texts import load_judged
from compress.reading.prompted_images import TEMPLATES, with_prompts
from compress.reading.questions import load_questions
from compress.reading.same_name import listed
from compress.reading.sentence_pairs import load_texts
from compress.reading.sources import Source, read_sources, repeats_of
from compress.reading.tagged import load_tagged
from compress.reading.text_blocks import load_blocks
from compress.reading.text_pairs import load_pairs
from compress.reading.transcripts import load_transcripts
from compress.reading.windowed import in_windows
from foundation.core.errors import InputError, Problem
from foundation.data.config import DataConfig, Prompts
from foundation.data.splits import Data, Split, divide, with_test
from foundation.labels.classes import ClassIds, UnknownClassIds
from foundation.labels.facts import Facts
from foundation.labels.form import Labels
from foundation.labels.tasks import TASKS, Task, tasks_with
from foundation.labels.value import SCORE
from foundation.models.config import NO_TOKENIZER
from foundation.models.inputs.tokenizer import TrainTokenizer, train_bpe


def load_data(
    config: DataConfig,
    task: Task,
    label_names: tuple[str, ...] | None,
    log: Callable[[str], None],
    tokenizer: str | TrainTokenizer | None = None,
) -> Data:
    """Reads the data of a recipe.

    Args:
        config: The data section.
        task: The task.
        label_names: Class names by id if the model determines them; None takes them from the train split. Unused for regression.
        log: Receives messages about what was found and decided.
        tokenizer: Hub id or folder of the tokenizer for text-generation, tags of words and windows of contexts, and of the prompts for
            searching; or the settings to train one on the train split.

    Returns:
        All splits, labelled with class ids (int64), sets of them (bool), values (float32), next-token ids or tags of words (int32), and the
        tokenizer if one was trained.

    Raises:
        InputError: Files or labels are wrong; the error lists all problems, one line each.
    """
    facts = TASKS[task]
    if facts.generates:
        if tokenizer is None:
            raise InputError.of([NO_TOKENIZER])
        return (load_pairs if facts.encoder_decoder else load_blocks)(config, task, tokenizer, log)
    _check_prompts(config, task)
    _check_keys(config, task)
    if facts.finds_spans:
        return load_questions(config, task, tokenizer, log)
    if facts.transcribes:
        return load_transcripts(config, task, label_names, log)
    if facts.tags:
        return load_tagged(config, task, label_names, tokenizer, log)
    if facts.searches:
        model = tokenizer if isinstance(tokenizer, str) else None
        data = load_candidates(config, task, log) if facts.reranks else load_judged(config, task, log, model)
    elif facts.captioned:
        data = load_captioned(config, task, log)
    elif facts.needs_pairs:
        data = load_texts(config, task, log)
    else:
        data = _load_labelled(config, task, label_names, log)
    if not isinstance(tokenizer, TrainTokenizer):
        return data if config.windows is None else in_windows(data, config, tokenizer, log)
    texts = [text for row in data.train.rows for text in (row if isinstance(row, tuple) else (row,)) if isinstance(text, str)]
    data = replace(data, tokenizer=train_bpe(texts, tokenizer.vocab_size, pads=True, starts=not facts.two_towers))
    return data if config.windows is None else in_windows(data, config, None, log)


def _load_labelled(config: DataConfig, task: Task, label_names: tuple[str, ...] | None, log: Callable[[str], None]) -> Data:
    facts = TASKS[task]
    sources = read_sources(config, task, log)
    without = [] if config.train_labels else sources.pop("train")
    unlabelled = labels.drop_unlabelled(sources, log)
    if without:
        _check_judged(sources)
    names, origin, predicts_values = SCORE, "data", not facts.named_classes
    every = [source for found in sources.values() for source in found]
    naming = every if without else sources["train"]
    vectors = facts.multi_label and label_sets.are_vectors(every, len(label_names) if label_names else None, config.multi_hot)
    if not predicts_values:
        found = partial(label_sets.set_names, vectors=vectors) if facts.multi_label else labels.class_names
        names, origin = (
            (label_names, "the model") if label_names else (found(naming), "validation and test" if without else "the train split")
        )
    ids = partial(label_sets.set_ids, vectors=vectors) if facts.multi_label else labels.class_ids
    numbered = label_names is not None or bool(labels.own_names(naming))
    convert = labels.values if predicts_values else partial(ids, names=names, origin=origin, numbered=numbered)
    if vectors:
        log(f"data: labels are vectors with 0 or 1 for each of {len(names)} labels: {listed(names)}")
    elif not predicts_values and (pairs := labels.matched_by_place(every, names)):
        log(f"data: the classes of the data have other names than {origin}, and are matched by their place: {pairs}")
    form = facts.answer.form if not facts.two_towers else ClassIds
    splits = _label(sources, lambda found: form(convert(found)))
    if without:
        rows = [row for source in without for row in source.rows]
        splits["train"] = Split(rows, UnknownClassIds(np.zeros(len(rows), np.int64)), repeats=repeats_of(without))
    if not unlabelled:
        with_test(splits, config.path, log)
    data = divide(
        splits["train"], splits.get("test"), splits.get("validation"), names, f"data.path {config.path}", log, config.keep_evaluation_rows
    )
    if not facts.two_towers:
        return data
    templates = config.prompts if isinstance(config.prompts, tuple) else TEMPLATES
    return with_prompts(data, templates, f"data.path {config.path}", log)


def _check_judged(sources: dict[str, list[Source]]) -> None:
    """Raises if there are no labels to decide by, or none to report results of."""
    absent = [name for name in ("validation", "test") if name not in sources]
    if absent:
        raise InputError(
            "data.train_labels",
            f"false given, and there is no labelled {' and no labelled '.join(absent)} split",
            "decisions and results need labelled rows, and not the same ones",
            "divide the labelled rows into a validation and a test split (data.files)",
        )


def _check_keys(config: DataConfig, task: Task) -> None:
    """Raises an `InputError` if a key is given that the task does not read."""
    facts = TASKS[task]
    readers: dict[str, Callable[[Facts], bool]] = {
        "candidates": lambda row: row.reranks,
        "negatives": lambda row: row.reads_negatives,
        "stride": lambda row: row.finds_spans,
        "multi_hot": lambda row: row.multi_label,
        "windows": lambda row: row.reads_windows,
    }
    if not config.train_labels and (not facts.answer.form.ONE_CLASS or facts.two_towers):
        tasks = tasks_with(lambda row: row.answer.form.ONE_CLASS and not row.two_towers)
        raise InputError("data.train_labels", f"false given for {task}", f"it is for {tasks}", "leave it out")
    if config.keep_evaluation_rows and facts.searches:
        raise InputError(
            "data.keep_evaluation_rows", f"true given for {task}, whose evaluation queries are never trained on", remedy="leave it out"
        )
    for key, reads in readers.items():
        given = getattr(config, key)
        if given is not None and not reads(facts):
            value = f"{str(given).lower()} " if isinstance(given, int) else ""
            raise InputError(f"data.{key}", f"{value}given for {task}", f"it is for {tasks_with(reads)}", "leave it out")


def _check_prompts(config: DataConfig, task: Task) -> None:
    """Raises an `InputError` if prompts are given in a form that the task does not read."""
    facts = TASKS[task]
    given, searches = config.prompts, facts.searches
    told = facts.two_towers and facts.named_classes
    if given is None:
        return
    if not searches and not told:
        tasks = tasks_with(lambda row: row.searches or (row.two_towers and row.named_classes))
        raise InputError("data.prompts", f"given for {task}", f"they are for {tasks}", "leave it out")
    if searches != isinstance(given, Prompts):
        allowed = "a map with query and document" if searches else "a list of texts with {}, where the name of a class goes,"
        raise InputError("data.prompts", f"{('a list' if searches else 'a map')} given for {task}", f"{allowed} is allowed")


def _label(sources: dict[str, list[Source]], convert: Callable[[list[Source]], Labels]) -> dict[str, Split]:
    splits: dict[str, Split] = {}
    problems: list[Problem] = []
    for split, found in sources.items():
        try:
            rows = [row for source in found for row in source.rows]
            splits[split] = Split(rows, convert(found), repeats=repeats_of(found))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError.of(problems)
    return splits
