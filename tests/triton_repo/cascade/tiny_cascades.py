"""Tiny cascades: an export of text classifiers whose networks differ, and a certificate that was made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino

from foundation.artifacts.artifact import Artifact, write_json
from foundation.artifacts.cascade import Cascade
from foundation.labels.classes import ClassIds
from foundation.measure.answers import compressed, save_predictions
from foundation.standalone.confidence import Score, confidence
from foundation.standalone.preprocess import Preprocessor
from tests.triton_repo import tiny_exports as tiny
from triton_repo.cascade.layout import ServedCascade, cascade_of

VARIANTS = (("small", "int8"), ("quantize", "int8"), ("baseline", "fp32"))
SEEDS = {"small": 2, "quantize": 1, "baseline": 0}
MARGIN: Score = {"name": "margin", "form": "class", "temperature": 1.0, "weights": [], "bias": []}
TAGS = ("O", "B-FILM", "I-FILM")
WORDS = ("a", "fine", "film", "dull", "and", "very", "long")


def prepared(form: str) -> Preprocessor:
    """The preprocessor of models whose answers have a form."""
    made = tiny.text_preprocessor()
    if form == "tags":
        return replace(made, task="token-classification", labels=TAGS, response="entities")
    if form == "value":
        return replace(made, task="text-regression", labels=("score",))
    if form == "vector":
        return replace(made, task="sentence-embedding", labels=("vector",) * 3, response="vector")
    return made


def score_of(form: str) -> Score:
    """A score of answers of a form; of vectors their first number."""
    if form not in ("value", "vector"):
        return {**MARGIN, "form": form}
    weights = [1.0, 0.0] if form == "value" else [1.0, 0.0, 0.0, 0.0]
    return {"name": "calibrated", "form": form, "temperature": 1.0, "weights": weights, "bias": [0.0]}


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of both lengths."""
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, draw.integers(1, 14))) for _ in range(count)]


def export(root: Path, rows, variants=("quantize", "baseline"), preprocessor: Preprocessor | None = None) -> Artifact:
    """An export of these variants, each with a network of its own, and its predictions of the rows."""
    prepared = preprocessor or tiny.text_preprocessor()
    made = tiny.export(root, prepared, rows, [pair for pair in VARIANTS if pair[0] in variants])
    for variant, precision in VARIANTS:
        if variant in variants:
            folder = root / f"{variant}-{precision}"
            openvino.save_model(tiny.network(prepared, SEEDS[variant]), folder / "openvino.xml", compress_to_fp16=False)
            labels = ClassIds(np.zeros(len(rows), np.int64))
            answers = compressed(prepared, rows, tiny.padded(prepared, rows, SEEDS[variant]))
            save_predictions(folder / "openvino.safetensors", answers, labels)
    return made


def document(
    thresholds, variants=("quantize", "baseline"), upper: float = 0.5, bound: float = 0.01, score=MARGIN, distance=None, **changes
) -> Cascade:
    """A certificate of these tiers."""
    precisions = dict(VARIANTS)
    tiers = [
        {
            "number": number,
            "variant": variant,
            "precision": precisions[variant],
            "float_precision": "fp32",
            "engine": "openvino",
            "mode": "static",
            "build": f"{variant}-{precisions[variant]}",
            "score": None if number == len(variants) else {**score},
            "threshold": None if number == len(variants) else thresholds[number - 1],
        }
        for number, variant in enumerate(variants, 1)
    ]
    limits = [{"tier": number, "units": 1, "n": 10, "rate": 0.1, "upper": upper, "confidence": 0.95} for number in range(1, len(tiers))]
    certificate = {"bound": bound, "confidence": 0.95, "n": 1000, "disagreements": 1, "p_value": 0.01, "max_distance": distance}
    contents = {"schema": 1, "task": "text-classification", "unit": "row", "tiers": tiers, "certificate": certificate, "escalation": limits}
    return Cascade.model_validate(contents | changes)


def cascade(root: Path, rows, thresholds, variants=("quantize", "baseline"), **about) -> ServedCascade:
    return cascade_of(export(root, rows, variants), document(thresholds, variants, **about))


def logits(rows, variants=("quantize", "baseline")) -> list[np.ndarray]:
    """Of each tier the logits of each row by itself."""
    return [tiny.expected(tiny.text_preprocessor(), rows, SEEDS[variant]) for variant in variants]


def middle(rows, variant: str = "quantize") -> float:
    """A threshold that about half of the rows reach."""
    return float(np.median(confidence(logits(rows, (variant,))[0], MARGIN)))


def answered(rows, thresholds, variants=("quantize", "baseline")) -> tuple[np.ndarray, np.ndarray]:
    """Logits and tier of each row, one row after the other."""
    found, tiers = [], []
    whole = logits(rows, variants)
    for row in range(len(rows)):
        for number, threshold in enumerate([*thresholds, -np.inf], 1):
            own = np.sort(whole[number - 1][row].astype(np.float64))
            if threshold is not None and own[-1] - own[-2] >= threshold:
                found.append(whole[number - 1][row])
                tiers.append(number)
                break
    return np.array(found), np.array(tiers)


def artifact(folder: Path, thresholds, **about) -> Artifact:
    """The artifact of the stage."""
    folder.mkdir(parents=True)
    write_json(folder / "cascade.json", json.loads(json.dumps(document(thresholds, **about).written())))
    return Artifact(folder, {"digest": "1"})
