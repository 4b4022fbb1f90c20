"""The reference evaluator of the package onnx: slow, and right by definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx.reference import ReferenceEvaluator

from export.engines.spec import BuildRequest, EngineSpec, Features, Logits


def refusal(precision: str, model: Path) -> str | None:
    """Returns None: it runs every graph."""
    return None


def build(request: BuildRequest) -> Iterator[dict[str, Any]]:
    """Needs no file beside the graph."""
    yield request.entry("dynamic", [request.model])


def open_engine(spec: EngineSpec) -> OnnxReference:
    """Opens the graph."""
    return OnnxReference(spec)


class OnnxReference:
    """An engine from an ONNX file."""

    def __init__(self, spec: EngineSpec) -> None:
        self._evaluator = ReferenceEvaluator(spec.path)

    def predict(self, features: Features) -> Logits:
        """Returns logits float32 [n, C]."""
        (logits,) = self._evaluator.run(["logits"], dict(features))
        return np.asarray(logits, np.float32)

    def precisions(self, gemms: Sequence[str], batch: int, sequence: int | None) -> dict[str, str]:
        """Returns nothing: it does not say what it multiplies in."""
        return {}
