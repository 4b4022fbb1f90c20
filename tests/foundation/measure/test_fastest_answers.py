"""Which engine serves a language model: clearly faster, and no worse where a goal tells."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from foundation.artifacts.exported import Build, Engine
from foundation.artifacts.timed import VariantSpeed
from foundation.core.goals import Goals
from foundation.core.target import Target
from foundation.measure.fastest_answers import CLEARLY, engines_that_answer, rate

GENAI, ONNX = "openvino_genai", "onnxruntime_decoder"
SCALE = ("perplexity", 50.0)


def entry(engine: str, perplexity: float = 50.0, mode: str = "any", rest: str = "fp32", runnable: bool = True) -> dict[str, Any]:
    return {"engine": engine, "mode": mode, "float_precision": rest, "runnable": runnable, "metrics": {"perplexity": perplexity}}


def row(engine: str, tokens: float, mode: str = "any", rest: str = "fp32") -> dict[str, Any]:
    return {"variant": "a", "precision": "w4a16", "engine": engine, "mode": mode, "float_precision": rest, "tokens_per_s": tokens}


def order(
    tmp_path: Path,
    entries: list[dict[str, Any]],
    rows: list[dict[str, Any]] | None,
    goals: Goals | None = None,
    proposed: bool = False,
    **target: Any,
) -> tuple[str, ...]:
    build = {"variant": "a", "precision": "w4a16", "float_precision": "fp32", "folder": "a-w4a16", "engines": entries}
    (tmp_path / "export.json").write_text(json.dumps({"builds": [build]}))
    if rows is not None:
        (tmp_path / "generation.json").write_text(json.dumps({"rows": rows}))
    wanted = Target(**{"engines": (GENAI, ONNX), **target})
    place = tmp_path if rows is not None else None
    return engines_that_answer(tmp_path, place, wanted, goals or Goals(), SCALE, proposed=proposed)["a-w4a16"]


@pytest.mark.parametrize(("factor", "first"), [(1.0 + CLEARLY - 0.01, GENAI), (1.0 + CLEARLY + 0.01, ONNX), (0.5, GENAI)])
def test_another_engine_serves_where_it_is_clearly_faster(factor: float, first: str, tmp_path: Path) -> None:
    rows = [row(GENAI, 100), row(GENAI, 400), row(ONNX, 100 * factor), row(ONNX, 400 * factor)]
    assert order(tmp_path, [entry(GENAI), entry(ONNX)], rows) == (first, *({GENAI, ONNX} - {first}))


def test_engines_that_no_server_on_the_cpu_runs_are_left_out(tmp_path: Path) -> None:
    kernels = "torch_kernels_decoder"
    assert order(tmp_path, [entry(kernels), entry(GENAI)], [row(kernels, 900), row(GENAI, 100)]) == (GENAI,)
    assert order(tmp_path, [entry(kernels)], None) == ()


def test_no_load_outweighs_another() -> None:
    rows, engine = [VariantSpeed(**row(GENAI, 10)), VariantSpeed(**row(GENAI, 1000))], Engine(**entry(GENAI))
    built = Build(variant="a", precision="w4a16", float_precision="fp32")
    assert rate(rows, built, engine) == pytest.approx(math.sqrt(10 * 1000))
    assert rate(rows, built.with_(variant="b"), engine) is None


def test_an_engine_that_loses_more_than_the_goal_serves_only_where_the_first_does_too(tmp_path: Path) -> None:
    goals, rows = Goals(max_drop=0.05), [row(GENAI, 100), row(ONNX, 200)]
    assert order(tmp_path, [entry(GENAI, 52), entry(ONNX, 53)], rows, goals)[0] == GENAI
    assert order(tmp_path, [entry(GENAI, 53), entry(ONNX, 54)], rows, goals)[0] == ONNX
    slower = [row(GENAI, 200), row(ONNX, 100)]
    assert order(tmp_path, [entry(GENAI, 53), entry(ONNX, 52)], slower, goals)[0] == ONNX  # the only one that meets it
    assert order(tmp_path, [entry(GENAI, 52), entry(ONNX, 53)], rows)[0] == ONNX  # nobody asked


def test_the_first_one_is_kept_where_it_is_asked_or_nothing_was_timed(tmp_path: Path) -> None:
    rows, entries = [row(GENAI, 100), row(ONNX, 200)], [entry(GENAI), entry(ONNX)]
    assert order(tmp_path, entries, rows, serve="first") == (GENAI, ONNX)
    assert order(tmp_path, entries, None) == (GENAI, ONNX)
    assert order(tmp_path, entries, [row(ONNX, 200)]) == (GENAI, ONNX)
    assert order(tmp_path, entries[::-1], rows) == (ONNX, GENAI)


def test_where_tokens_are_proposed_an_engine_that_takes_them_serves(tmp_path: Path) -> None:
    rows = [row(GENAI, 100), row(ONNX, 200)]
    assert order(tmp_path, [entry(GENAI), entry(ONNX)], rows, proposed=True) == (GENAI, ONNX)


def test_an_engine_stands_with_its_recommended_mode_and_only_where_it_runs(tmp_path: Path) -> None:
    entries = [entry(GENAI, rest="bf16"), entry(GENAI), entry(ONNX, runnable=False)]
    assert order(tmp_path, entries, [row(GENAI, 100), row(ONNX, 900)]) == (GENAI,)
    fast_rest = [row(GENAI, 10), row(GENAI, 300, rest="bf16"), row(ONNX, 200)]
    assert order(tmp_path, [entry(GENAI, rest="bf16"), entry(GENAI), entry(ONNX)], fast_rest)[0] == GENAI
    assert order(tmp_path, [entry("openvino", runnable=True)], fast_rest) == ()
