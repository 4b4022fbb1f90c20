"""The predictions of every variant in every backend: torch, the engines and the running Triton server.

Each evaluation covers the whole evaluation split; its artifact stores the predictions in row order. This module loads them, lists every row
whose prediction changed from one backend to the next, and keeps 64 golden rows for `verify`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from compress.artifacts import artifact
from compress.artifacts.run_folder import Run
from compress.core import candidates, relevance
from compress.core.engines import REFERENCE
from compress.core.errors import InputError
from compress.core.files import check_plain
from compress.core.next_token import choices
from compress.core.shown import reason
from compress.core.step_names import EVALUATION
from compress.core.tasks import TASKS
from compress.core.vectors import neighbours
from compress.data.splits import Data
from compress.measure.answers import load_predictions
from compress.measure.engine_process import read_rows, write_rows
from compress.standalone.preprocess import Row, TokenPair

GOLDEN_ROWS = 64
TOKENS_SHOWN = 16
SERVED = "triton.json"
EXPORTED = "export.json"


@dataclass(frozen=True)
class Evaluation:
    """The predictions of one variant in one backend, on the whole evaluation split."""

    variant: str
    backend: str
    """torch, onnxruntime, openvino, tensorrt or triton."""
    mode: str
    precision: str
    logits: np.ndarray
    """float32 [n, C], in the order of the evaluation split; for generation [n, T, 2], see `compress.core.next_token`."""
    labels: np.ndarray
    """int64 or float32 [n], or int32 [n, T]."""
    metrics: dict[str, float]


def builds(run: Run) -> list[dict[str, Any]]:
    """Returns the builds of the export stage; empty if the recipe does not export."""
    exported = run.of_kind("engine")
    if exported is None:
        return []
    document: dict[str, Any] = artifact.read_json(exported.path / EXPORTED)
    return list(document["builds"])


def main_builds(run: Run) -> dict[str, dict[str, Any]]:
    """Returns the build that represents each exported variant: its int8 build if there is one, else its float build."""
    chosen: dict[str, dict[str, Any]] = {}
    for build in builds(run):
        if build["variant"] not in chosen or build["precision"] == "int8":
            chosen[build["variant"]] = build
    return chosen


def served(run: Run) -> list[dict[str, Any]]:
    """Returns the models that were evaluated through the Triton server; empty if none was."""
    return list(_triton(run).get("models", []))


def for_gpus(run: Run) -> list[dict[str, Any]]:
    """Returns the models of the additional repositories for GPUs, which no server has run; empty where there is none."""
    told = _triton(run)
    return [told[key] for key in ("gpu", "kernels") if key in told]


def tuned(run: Run) -> dict[str, Any]:
    """Returns the search over the settings of the served model as `tuned`; empty where none was asked for."""
    return {"tuned": found} if (found := _triton(run).get("tuned")) else {}


def _triton(run: Run) -> dict[str, Any]:
    """Returns what the stage wrote about its models; empty without one."""
    repository = run.of_kind("model_repository")
    if repository is None or not (repository.path / SERVED).exists():
        return {}
    found: dict[str, Any] = artifact.read_json(repository.path / SERVED)
    return found


def evaluations(run: Run) -> Iterator[Evaluation]:
    """Yields the evaluations of every variant in the order torch, engines, server; of each engine only its recommended mode."""
    exported, repository = run.of_kind("engine"), run.of_kind("model_repository")
    for name in run.variants:
        yield _load(name, REFERENCE, "eager", "", run.predictions(name), run.artifacts[f"{EVALUATION}{name}"].metrics["metrics"])
        build = main_builds(run).get(name)
        for engine in recommended(build) if build else []:
            if engine.get("predictions") and build and exported:
                path = exported.path / engine["predictions"]
                yield _load(name, engine["engine"], engine["mode"], build["precision"], path, engine["metrics"])
        for model in served(run):
            if build and (model["variant"], model["precision"]) == (name, build["precision"]) and model.get("predictions") and repository:
                yield _load(name, "triton", "", model["precision"], repository.path / model["predictions"], model["metrics"])


def recommended(build: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns one entry for each engine of a build: its recommended mode, which is listed first."""
    first: dict[str, dict[str, Any]] = {}
    for engine in build["engines"]:
        if engine["engine"] != REFERENCE:
            first.setdefault(engine["engine"], engine)
    return list(first.values())


def write_flips(run: Run, data: Data) -> int:
    """Writes `flips.jsonl`: one line for each row (or token) whose prediction changed.

    Engines are compared with the backend before them, each variant in torch with the baseline in torch.

    Returns:
        The number of lines.
    """
    lines: list[dict[str, Any]] = []
    baseline: np.ndarray | None = None
    before: tuple[np.ndarray, str] | None = None
    describe = _described(run, data)
    for evaluation in evaluations(run):
        answers = describe.answers(evaluation.logits)
        if evaluation.backend == REFERENCE:
            reference, origin = (baseline, "baseline torch") if baseline is not None else (answers, "")
            baseline = answers if baseline is None else baseline
        else:
            assert before is not None
            reference, origin = before
        for place in np.argwhere(answers != reference):
            at = tuple(place.tolist())
            flip = describe.line(at, int(reference[at]), int(answers[at]), evaluation.labels)
            lines.append({"row": at[0], "variant": evaluation.variant, "from": origin, "to": evaluation.backend, **flip})
        before = (answers, evaluation.backend)
    artifact.write_text(run.folder / "flips.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return len(lines)


def _described(run: Run, data: Data) -> RowFlips | TokenFlips | NeighbourFlips | FoundFlips | FirstFlips:
    facts = TASKS[run.recipe["model"]["task"]]
    if facts.generates:
        return TokenFlips(next(iter(run.variants.values())).path, data)
    if candidates.are_candidates(data.evaluation.labels):
        return FirstFlips(data)
    if facts.embeds:
        return FoundFlips(data) if relevance.are_judged(data.evaluation.labels) else NeighbourFlips(data)
    return RowFlips(data)


def write_golden(run: Run, data: Data) -> None:
    """Writes `golden.safetensors`: 64 rows with their logits from every backend and served model; `verify` then needs no data set."""
    count = min(GOLDEN_ROWS, len(data.evaluation))
    chosen = np.linspace(0, len(data.evaluation) - 1, count).round().astype(np.int64)
    tensors: dict[str, np.ndarray] = {"row": chosen}
    for evaluation in evaluations(run):
        if evaluation.backend != "triton":
            tensors[f"logits.{evaluation.variant}.{evaluation.backend}"] = np.ascontiguousarray(evaluation.logits[chosen])
    repository = run.of_kind("model_repository")
    for model in served(run):
        if model.get("predictions") and repository:
            logits, _ = load_predictions(repository.path / model["predictions"])
            tensors[f"logits.{model['model']}.triton"] = np.ascontiguousarray(logits[chosen])
    temporary = run.folder / ".golden.safetensors.tmp"
    write_rows(temporary, [data.evaluation.rows[row] for row in chosen], tensors)
    temporary.replace(run.folder / "golden.safetensors")


def read_golden(path: Path) -> tuple[list[Row], dict[str, np.ndarray]]:
    """Returns the golden rows and their logits: by `variant.backend`, and by `model.triton` for the server.

    Raises:
        InputError: The file is missing or damaged.
    """
    check_plain(path, str(path))
    try:
        logits = {name.removeprefix("logits."): value for name, value in load_file(path).items() if name.startswith("logits.")}
        rows = read_rows(path)
    except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path}: damaged ({reason(error)}); `compress run` writes it again") from error
    if not rows or any(len(value) != len(rows) for value in logits.values()):
        raise InputError(f"{path}: damaged ({len(rows)} rows, and another number of logits); `compress run` writes it again")
    return rows, logits


def _load(variant: str, backend: str, mode: str, precision: str, path: Path, metrics: dict[str, float]) -> Evaluation:
    logits, labels = load_predictions(path)
    return Evaluation(variant, backend, mode, precision, logits, labels, metrics)


@dataclass(frozen=True)
class RowFlips:
    """Describes the flip of one row."""

    data: Data

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the class of each row [n]; a tie goes to the lowest index. Regression has a single class, so nothing flips."""
        answers: np.ndarray = logits.argmax(axis=1)
        return answers

    def line(self, place: tuple[int, ...], before: int, after: int, labels: np.ndarray) -> dict[str, Any]:
        """Returns both predictions, the label and the input row."""
        names, label = self.data.labels, int(labels[place])
        text = _readable(self.data.evaluation.rows[place[0]])
        return {"before": names[before], "after": names[after], "label": names[label], "input": text}


class NeighbourFlips:
    """Describes the flip of one text: another text of the evaluation split is now the nearest to it.

    Texts that occur more than once count once: which of two equal vectors is nearer is chance.

    Args:
        data: The data of the run.
    """

    def __init__(self, data: Data) -> None:
        self.data = data
        first: dict[Any, int] = {}
        for number, row in enumerate(data.evaluation.rows):
            first.setdefault(row, number)
        self.rows = np.array(list(first.values()))

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the row of the nearest other text of each text [n]; of a text that occurred before, its own row."""
        answers = np.arange(len(logits))
        if len(self.rows) > 1:
            answers[self.rows] = self.rows[neighbours(logits[self.rows])[:, 0]]
        return answers

    def line(self, place: tuple[int, ...], before: int, after: int, labels: np.ndarray) -> dict[str, Any]:
        """Returns both neighbours and the text; there is no label of them."""
        rows = self.data.evaluation.rows
        return {"before": rows[before], "after": rows[after], "label": None, "input": rows[place[0]]}


class FoundFlips:
    """Describes the flip of one query: another document is now the first that is found for it.

    Documents that occur more than once count once: which of two equal vectors is nearer is chance.

    Args:
        data: The data of the run.
    """

    def __init__(self, data: Data) -> None:
        self.data = data
        self.known = relevance.judged(data.evaluation.labels)
        first: dict[Any, int] = {}
        for row in self.known.documents.tolist():
            first.setdefault(data.evaluation.rows[row], row)
        self.documents = np.array(list(first.values()))
        rows = self.known.documents
        self.grades = {
            query: {int(rows[place]): grade for place, grade in grades.items()}
            for query, grades in zip(self.known.queries.tolist(), self.known.grades, strict=True)
        }

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the row of the first document found for each query [n]; of other rows, their own."""
        answers = np.arange(len(logits))
        places = relevance.nearest(logits[self.known.queries], logits[self.documents], 1)[:, 0]
        answers[self.known.queries] = self.documents[places]
        return answers

    def line(self, place: tuple[int, ...], before: int, after: int, labels: np.ndarray) -> dict[str, Any]:
        """Returns both documents with their grades, and the query."""
        rows, grades = self.data.evaluation.rows, self.grades[place[0]]
        found = {"grade_before": grades.get(before, 0), "grade_after": grades.get(after, 0), "label": None, "input": rows[place[0]]}
        return {"before": rows[before], "after": rows[after], **found}


class FirstFlips:
    """Describes the flip of one query: another candidate now comes first. Its row is that of the first candidate.

    Args:
        data: The data of the run.
    """

    def __init__(self, data: Data) -> None:
        self.data = data

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns for the first row of each query the row of the candidate with the highest score [n]; of other rows, their own."""
        answers = np.arange(len(logits))
        for query in candidates.ordered(logits, self.data.evaluation.labels):
            answers[query.rows.min()] = query.rows[0]
        return answers

    def line(self, place: tuple[int, ...], before: int, after: int, labels: np.ndarray) -> dict[str, Any]:
        """Returns both candidates with their grades, and the query."""
        rows: list[Any] = [*self.data.evaluation.rows]
        (query, first), (_, second) = rows[before], rows[after]
        grades = {"grade_before": int(labels[before, 2]), "grade_after": int(labels[after, 2])}
        return {"before": first, "after": second, **grades, "label": None, "input": query}


class TokenFlips:
    """Describes the flip of one token.

    Args:
        checkpoint: A checkpoint with the tokenizer that produced the text blocks.
        data: The data of the run.
    """

    def __init__(self, checkpoint: Path, data: Data) -> None:
        from tokenizers import Tokenizer

        self.tokenizer, self.data = Tokenizer.from_file(str(checkpoint / "tokenizer.json")), data

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the id of the most likely token [n, T]."""
        return choices(logits)

    def line(self, place: tuple[int, ...], before: int, after: int, labels: np.ndarray) -> dict[str, Any]:
        """Returns both predicted tokens, the token that followed, and the text just before it."""
        (row, position), label = place, int(labels[place])
        given: Any = self.data.evaluation.rows[row]
        # what stands before the token: the source and the target up to it, or the block
        pair = isinstance(given, TokenPair)
        block = np.concatenate([given.source, given.target]) if pair else given
        end = len(given.source) + position if pair else position + 1
        texts = {name: self._text([token]) for name, token in (("before", before), ("after", after), ("label", label))}
        return {"position": position + 1, **texts, "input": self._text(block[max(0, end - TOKENS_SHOWN) : end].tolist())}

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _readable(row: Any) -> Any:
    return f"image of {len(row)} bytes" if isinstance(row, bytes) else row
