"""Splits the data of a run into train, selection and evaluation rows, without leaks between them.

    train       rows to train on; calibration rows are taken from here
    selection   rows for every decision of the tool: the validation split if there is also a labelled test split, else 5 % of train (200 to
                2,000 rows, and at most a fifth of train)
    evaluation  rows for reported results only: the labelled test split, else the validation split

Rows are identified by what a model reads of them (texts, image bytes or token ids, without the label or the target), and rows with equal
content stay together. Nothing is learned, calibrated or decided on rows that results are reported of, and nothing is decided on rows that
were trained on: rows in evaluation are removed from train and selection, rows in selection from train. `data.keep_evaluation_rows` leaves
rows of evaluation in train, and the report says how many they are.

Where it is known which rows are of one document (`Split.documents`: the context of questions, documents of sentences), selection rows are
whole documents, so that no part of a text is trained on and another part decides.

Rows that are trained on several times in a pass (`Split.repeats`) are divided as single rows. The train split repeats them afterwards.

Random choices use a hash of the content, so they depend neither on the order of the rows nor on rows added later.

Not supported: stratification. 200 rows chosen by hash approximate the class frequencies well enough, and stay the same when rows are added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from foundation.core.errors import InputError
from foundation.core.files import local
from foundation.core.runs import rows_of
from foundation.labels.form import Labels
from foundation.standalone.adapted import adapter_of, plain
from foundation.standalone.preprocess import Row, TokenPair
from foundation.standalone.windows import Window

if TYPE_CHECKING:
    from foundation.models.inputs.tokenizer import TrainedTokenizer

SELECTION_SHARE = 0.05
SELECTION_ROWS = (200, 2000)
LARGEST_SHARE = 0.2
Judge = Literal["evaluation", "selection"]
"""Rows that models are judged on. selection: a candidate of a search is judged on them, as it must not see evaluation rows."""


def content_key(row: Row) -> bytes:
    """Returns a 16-byte hash of the content of a row; a pair differs from its concatenated texts."""
    if (adapter := adapter_of(row)) is not None:
        name = adapter.encode()
        return hashlib.blake2b(b"%d:%b%b" % (len(name), name, content_key(plain(row))), digest_size=16, person=b"adapted").digest()
    if isinstance(row, bytes):
        return hashlib.blake2b(row, digest_size=16, person=b"image").digest()
    if isinstance(row, np.ndarray):
        return hashlib.blake2b(row.tobytes(), digest_size=16, person=b"block").digest()
    if isinstance(row, TokenPair):
        parts = b"%d:%b%b" % (len(row.source), row.source.tobytes(), row.target.tobytes())
        return hashlib.blake2b(parts, digest_size=16, person=b"tokens").digest()
    if isinstance(row, Window):
        question, context = row.question.encode(), row.context.encode()
        whole = b"%d:%b%d:%b%d:%d" % (len(question), question, len(context), context, row.start, row.stop)
        return hashlib.blake2b(whole, digest_size=16, person=b"window").digest()
    if isinstance(row, tuple):
        first, second = (part.encode() for part in row)
        return hashlib.blake2b(b"%d:%b%b" % (len(first), first, second), digest_size=16, person=b"pair").digest()
    assert isinstance(row, str), type(row)
    return hashlib.blake2b(row.encode(), digest_size=16, person=b"text").digest()


def input_key(row: Row) -> bytes:
    """Returns a 16-byte hash of what a model reads of a row: of a source and its target the source, of texts the words. The name of an
    adapter is left out: the model below the adapters does not read it.

    Spaces do not count: the train sentences of SST-2 end with one, and the same sentences in its test file do not.
    """
    if isinstance(row, TokenPair):
        return content_key(row.source)
    if isinstance(row, str):
        return content_key(" ".join(row.split()))
    if isinstance(row, tuple):
        first, second = (" ".join(part.split()) for part in row)
        return content_key((first, second))
    return content_key(row)


TEST_SHARE = 0.2
"""Share of the rows of a single file that become the test split."""


@dataclass(frozen=True)
class Split:
    """Rows and their labels."""

    rows: list[Row]
    """Texts, pairs of texts, encoded images, blocks or pairs of token ids, or questions with windows of their contexts."""
    labels: Labels
    """In the form that the task has (`foundation.labels`)."""
    documents: np.ndarray | None = None
    """Number of the document that each row is of, int64 [n]; None where documents are not known, or every row is one."""
    repeats: np.ndarray | None = None
    """How many times a pass takes each row, int64 [n], until splits are divided; None: once."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def runs(self) -> np.ndarray:
        """Sizes of the runs of rows that belong together, int64 [r]: 2 for texts of pairs, 3 or more for texts with negatives, the sizes of
        the candidates of a query, else 1 (`foundation.core.runs`)."""
        return self.labels.runs()

    @property
    def together(self) -> int:
        """Rows of the largest run of rows that belong together."""
        return int(self.runs.max(initial=1))

    @cached_property
    def keys(self) -> list[bytes]:
        """The content key of every row."""
        return [content_key(row) for row in self.rows]

    @cached_property
    def input_keys(self) -> list[bytes]:
        """The input key of every row."""
        return [input_key(row) for row in self.rows]

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of contents and labels, in order."""
        labels = np.ascontiguousarray(self.labels.array)
        contents = hashlib.sha256(f"{len(self)} {labels.dtype.str} ".encode())
        contents.update(b"".join(self.keys))
        contents.update(labels.tobytes())
        return contents.hexdigest()

    def take(self, indices: Sequence[int]) -> Split:
        """Returns the rows at `indices`, in that order."""
        places = np.array(indices, dtype=np.int64)
        documents, repeats = (None if column is None else column[places] for column in (self.documents, self.repeats))
        return Split([self.rows[i] for i in indices], self.labels[places], documents, repeats)

    def repeated(self) -> Split:
        """Returns the split with each row as often as a pass takes it: all rows, then again those that are taken twice, and so on."""
        if self.repeats is None:
            return self
        turns = range(int(self.repeats.max(initial=1)))
        return replace(self, repeats=None).take([row for turn in turns for row in np.flatnonzero(self.repeats > turn).tolist()])

    def take_runs(self, chosen: Sequence[int]) -> Split:
        """Returns the rows of some runs (`runs`), by their numbers and in that order; one that is chosen twice becomes two."""
        part = self.take(rows_of(self.runs, chosen).tolist())
        return replace(part, labels=part.labels.renumber(self.runs[list(chosen)]))


@dataclass(frozen=True)
class CertifyRows:
    """Rows of a certificate: neither train, selection nor evaluation rows."""

    rows: list[Row]
    """As in a split."""
    labels: Labels | None = None
    """In the form that the task has; None where they were not read."""
    shared: int = 0
    """Rows of the files that were left out, because they are train, selection or evaluation rows too."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def keys(self) -> list[bytes]:
        """The content key of every row."""
        return [content_key(row) for row in self.rows]

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of contents and labels, in order."""
        labels = b"" if self.labels is None else np.ascontiguousarray(self.labels.array).tobytes()
        return hashlib.sha256(b"%d %b%b" % (len(self), b"".join(self.keys), labels)).hexdigest()


@dataclass(frozen=True)
class Shared:
    """Train rows with the content of an evaluation row."""

    left_out: int = 0
    """Train rows that were removed for it."""
    in_train: int = 0
    """Evaluation rows that are trained on, as the recipe asks for (`data.keep_evaluation_rows`)."""


@dataclass(frozen=True)
class Data:
    """The data of a run."""

    train: Split
    """Rows to train on."""
    selection: Split
    """Rows for every decision of the tool."""
    evaluation: Split
    """Rows for reported results only."""
    labels: tuple[str, ...]
    """Class names by id; ("score",) for regression, () where text is generated."""
    tokenizer: TrainedTokenizer | None = None
    """The tokenizer trained on the train split; None if the recipe names one or needs none."""
    hidden: Split | None = None
    """The true evaluation rows, where selection rows have taken their place."""
    shared: Shared = Shared()
    """Rows that train and evaluation had in common."""
    certify: CertifyRows | None = None
    """Rows of a certificate, which nothing else depends on; None where the recipe has none."""

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of all splits and label names; the same whatever models are judged on, as training depends on none of that."""
        if self.hidden is not None:
            return replace(self, evaluation=self.hidden, hidden=None).digest
        parts = [repr(self.labels), self.train.digest, self.selection.digest, self.evaluation.digest]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def judge(self) -> Judge:
        """Which rows `evaluation` holds."""
        return "evaluation" if self.hidden is None else "selection"

    @property
    def never_trained(self) -> list[Row]:
        """The rows that no model may learn from: the rows of the evaluation and the selection split."""
        return [*(self.hidden or self.evaluation).rows, *self.selection.rows]

    def judged_on(self, judge: Judge) -> Data:
        """Returns the data with the rows that models are judged on as `evaluation`.

        Raises:
            InputError: Selection rows are asked for, and there are none.
        """
        if judge == self.judge:
            return self
        if judge == "evaluation":
            assert self.hidden is not None, "the judge is another one"
            return replace(self, evaluation=self.hidden, hidden=None)
        if not len(self.selection):
            raise InputError("data", "there are no selection rows, which candidates are judged on", remedy="give more train rows")
        return replace(self, evaluation=self.selection, hidden=self.evaluation)

    def calibration(self, num_rows: int = 512, seed: int = 0) -> Split:
        """Returns up to `num_rows` train rows with distinct content, chosen by hash and `seed`, in train order; of pairs both texts, of
        candidates whole lists, at least one."""
        sizes = self.train.runs
        ends = np.cumsum(sizes)
        keys = [b"".join(self.train.keys[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        salt = b"calibration %d" % seed
        order = sorted(first, key=lambda key: hashlib.blake2b(key, digest_size=8, salt=salt[-16:]).digest())
        chosen = order[: max(1, num_rows // self.train.together)]
        return self.train.take_runs(sorted(first[key] for key in chosen))


def divide(
    train: Split,
    test: Split | None,
    validation: Split | None,
    labels: tuple[str, ...],
    where: str,
    log: Callable[[str], None],
    keep: bool = False,
) -> Data:
    """Decides which rows are used for training, selection and evaluation.

    Args:
        train: The train split.
        test: The labelled test split, if any.
        validation: The labelled validation split, if any.
        labels: Class names.
        where: Name of the data in messages.
        log: Receives messages about what was decided.
        keep: Whether train rows that are also in evaluation stay.

    Raises:
        InputError: There are no rows to evaluate on, or none left to train or select on.
    """
    evaluation = test or validation
    if evaluation is None:
        raise InputError(
            where, "no labelled test or validation split", "one of them is needed to measure the results", "name it in data.files"
        )
    final = frozenset(evaluation.input_keys)
    train, shared = _without_evaluation(train, evaluation, where, log, keep=keep)
    selection = _without(validation, final) if test and validation else None
    if validation and selection is not None and len(selection) < len(validation):
        log(f"data: {len(validation) - len(selection)} validation rows that are also in test are dropped")
    carved = not selection
    if carved and not train.labels.KNOWN:
        raise InputError(
            where, "all validation rows are test rows too", "decisions need labelled rows that results are not of", "give others"
        )
    if not selection:
        selection = _carve(train, final, where, log)
        log(f"data: {len(selection)} train rows, chosen by content hash, are set aside for selection")
    given, train = len(train), _without(train, frozenset(selection.input_keys))
    if not carved and len(train) < given:
        log(f"data: {given - len(train)} train rows that are also in validation are dropped")
    if not train:
        raise InputError(
            where, "no train rows left: all of them equal selection rows, which are never trained on", remedy="add other train rows"
        )
    selection, evaluation = (replace(split, repeats=None) for split in (selection, evaluation))
    if len(repeated := train.repeated()) > len(train):
        log(f"data: {len(train)} train rows become {len(repeated)}, as files of data.files.train repeat")
        train = repeated
    named = f"; {len(labels)} label{'s' if len(labels) > 1 else ''}: {_shown(labels)}" if labels else ""
    log(f"data: {len(train)} train, {len(selection)} selection, {len(evaluation)} evaluation rows{named}")
    return Data(train, selection, evaluation, labels, shared=shared)


def _without_evaluation(train: Split, evaluation: Split, where: str, log: Callable[[str], None], *, keep: bool) -> tuple[Split, Shared]:
    """Returns the train rows without those that are also in evaluation, and how many they are."""
    final = frozenset(evaluation.input_keys)
    rest = _without(train, final)
    count = len(train) - len(rest)
    if not count:
        return train, Shared()
    if keep:
        known = frozenset(train.input_keys)
        log(f"data: {count} train rows have the content of an evaluation row; they stay, as data.keep_evaluation_rows asks for")
        return train, Shared(in_train=sum(key in known for key in evaluation.input_keys))
    if not rest:
        raise InputError(
            where,
            f"all {count} train rows are evaluation rows too, so that no result would say anything of new rows",
            remedy="give other train rows, other evaluation rows (data.files), or data.keep_evaluation_rows: true",
        )
    log(f"data: {count} train rows that are also in evaluation are left out of training, calibration and selection")
    return rest, Shared(left_out=count)


def trained_on(data: Data) -> str | None:
    """Returns a warning where evaluation rows are trained on; None where none is."""
    if not data.shared.in_train:
        return None
    count = len(data.evaluation if data.hidden is None else data.hidden)
    return f"{data.shared.in_train} of {count} evaluation rows are trained on (data.keep_evaluation_rows): figures say little of new rows"


def selection_rows(num_rows: int) -> int:
    """Returns how many of these train rows are set aside for selection: 5 %, 200 to 2,000, at most a fifth, at least one."""
    low, high = SELECTION_ROWS
    return max(1, min(max(low, min(high, round(SELECTION_SHARE * num_rows))), int(LARGEST_SHARE * num_rows)))


def hold_out(split: Split, share: float) -> tuple[Split, Split]:
    """Splits off about `share` of the rows by content hash; returns (rest, split-off rows). Rows with equal content stay together."""
    wanted = round(len(split) * share)
    chosen = _by_hash(split, frozenset(), wanted, b"hold out")
    if split.documents is not None and len(chosen) > 2 * wanted:  # whole documents are too large
        chosen = _by_hash(replace(split, documents=None), frozenset(), wanted, b"hold out")
    rest = sorted(set(range(len(split))) - set(chosen))
    return split.take(rest), split.take(chosen)


def chosen_rows(train: Split, fraction: float) -> Split:
    """Returns about this share of the rows, chosen by content hash: the same for every row order, seed and machine."""
    return train if fraction == 1 else hold_out(train, fraction)[1]


def with_test(splits: dict[str, Split], path: str, log: Callable[[str], None], rows: str = "rows") -> None:
    """Makes some rows of train the test split, in place, where a single file is all that there is.

    Args:
        splits: The splits by name.
        path: `data.path` of the recipe.
        log: Receives a message about it.
        rows: What they are called there.
    """
    if list(splits) == ["train"] and local(path, "data.path").is_file():
        splits["train"], splits["test"] = hold_out(splits["train"], TEST_SHARE)
        log(f"data: {path} is a single file; {len(splits['test'])} of its {rows}, chosen by content hash, become the test split")


def _carve(train: Split, banned: frozenset[bytes], where: str, log: Callable[[str], None]) -> Split:
    chosen = _by_hash(train, banned, selection_rows(len(train)), b"selection")
    if train.documents is not None and len(chosen) > LARGEST_SHARE * len(train):
        log("data: every document holds more rows than selection takes; rows of one document are in train and in selection")
        chosen = _by_hash(replace(train, documents=None), banned, selection_rows(len(train)), b"selection")
    if not chosen:
        raise InputError(
            where, "no train rows can be set aside for selection", "rows that differ from each other and from evaluation are needed"
        )
    return train.take(chosen)


def _by_hash(split: Split, banned: frozenset[bytes], wanted: int, salt: bytes) -> list[int]:
    """Returns the ascending indices of about `wanted` rows: whole groups of equal content, or of one document, in the order of their
    hashes."""
    groups: dict[bytes, list[int]] = {}
    documents = None if split.documents is None else _names(split)
    for index, (key, known) in enumerate(zip(split.keys, split.input_keys, strict=True)):
        if known not in banned:
            groups.setdefault(key if documents is None else documents[index], []).append(index)
    order = sorted(groups, key=lambda key: hashlib.blake2b(key, digest_size=8, salt=salt).digest())
    chosen: list[int] = []
    for key in order:
        if len(chosen) + len(groups[key]) <= wanted:
            chosen += groups[key]
    return sorted(chosen or (groups[order[0]] if order else []))


def _names(split: Split) -> list[bytes]:
    """Returns for each row what its document is known by: the least of the keys of its rows."""
    assert split.documents is not None, "documents are known"
    least: dict[int, bytes] = {}
    numbers = split.documents.tolist()
    for number, key in zip(numbers, split.keys, strict=True):
        least[number] = min(key, least.get(number, key))
    return [least[number] for number in numbers]


def _without(split: Split, banned: frozenset[bytes]) -> Split:
    kept = [index for index, key in enumerate(split.input_keys) if key not in banned]
    return split if len(kept) == len(split) else split.take(kept)


def _shown(labels: tuple[str, ...]) -> str:
    return ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
