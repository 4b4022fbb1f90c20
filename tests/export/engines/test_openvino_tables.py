"""Tables of embeddings in bf16 against a network whose tables were rounded by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openvino import opset13 as ops

from export.engines.openvino import HALVED, build, open_engine
from export.engines.openvino_tables import with_half_tables
from export.engines.spec import BuildRequest, EngineSpec
from foundation.core.target import Target
from foundation.models.folder import Checkpoint
from foundation.standalone.preprocess import Preprocessor
from tests.export import sentiment

pytestmark = pytest.mark.whole


def rounded(table: np.ndarray) -> np.ndarray:
    return torch.from_numpy(table).to(torch.bfloat16).float().numpy()


def network(words: np.ndarray, places: np.ndarray, folder: Path, *, tied: bool = False) -> Path:
    """Sums of two rows; where the table is tied, products with all of it."""
    ids = ops.parameter([-1, -1], np.int64, name="ids")
    ids.output(0).set_names({"ids"})
    table, axis = ops.constant(words), ops.constant(np.int64(0))
    rows = ops.gather(table, ids, axis)
    rows.output(0).set_names({"rows"})
    total = ops.add(rows, ops.gather(ops.constant(places), ids, axis))
    result = ops.matmul(total, table, False, True) if tied else total
    openvino.save_model(openvino.Model([result.output(0)], [ids], "sum"), folder / "given.xml", compress_to_fp16=False)
    return folder / "given.xml"


def answer(path: Path, ids: np.ndarray) -> Any:
    return openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})({"ids": ids})[0]


def tables(seed: int, count: int, width: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return tuple((random.standard_normal((count, width)) * scale).astype(np.float32) for _ in range(2))  # type: ignore[return-value]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 99), st.integers(1, 40), st.integers(1, 33), st.sampled_from([1e-30, 1.0, 1e37]), st.integers(1, 4))
def test_rows_are_those_of_tables_rounded_by_hand(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, width: int, scale: float, batch: int
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    words, places = tables(seed, count, width, scale)
    ids = np.random.default_rng(seed).integers(0, count, (batch, 7))
    found = with_half_tables(network(words, places, folder), folder / "half.xml")
    assert found == folder / "half.xml"
    np.testing.assert_array_equal(answer(found, ids), rounded(words)[ids] + rounded(places)[ids])


def test_half_of_the_bytes_and_every_name_stay(tmp_path: Path) -> None:
    given = network(*tables(0, 1000, 64, 1.0), tmp_path)
    found = with_half_tables(given, tmp_path / "half.xml")
    assert found.with_suffix(".bin").stat().st_size < 0.51 * given.with_suffix(".bin").stat().st_size

    def names(path: Path) -> dict[str, str]:
        nodes = openvino.Core().read_model(path).get_ops()
        return {name: str(out.get_element_type()) for node in nodes for out in node.outputs() for name in out.get_names()}

    assert names(found) == names(given)
    assert "rows" in names(found)


def test_a_table_that_is_multiplied_too_stays(tmp_path: Path) -> None:
    words, places = tables(0, 20, 8, 1.0)
    ids = np.array([[3, 19]])
    found = with_half_tables(network(words, places, tmp_path, tied=True), tmp_path / "half.xml")
    np.testing.assert_allclose(answer(found, ids), (words[ids] + rounded(places)[ids]) @ words.T, rtol=1e-5, atol=1e-5)


def test_a_network_without_tables_is_served_as_it_is(tmp_path: Path) -> None:
    x = ops.parameter([-1, 4], np.float32, name="x")
    openvino.save_model(openvino.Model([ops.relu(x).output(0)], [x], "x"), tmp_path / "given.xml")
    assert with_half_tables(tmp_path / "given.xml", tmp_path / "half.xml") == tmp_path / "given.xml"
    assert not (tmp_path / "half.xml").exists()


def request(folder: Path, out: Path, precision: str, *, half_part: bool) -> BuildRequest:
    floating = precision if precision == "bf16" else "fp32"
    target = Target(engines=("openvino",), batch_sizes=(1,), sequence_lengths=(8,))
    checkpoint = sentiment.checkpoint()
    return BuildRequest(
        *("openvino", Checkpoint(checkpoint), folder / "model.onnx", Path(out.anchor), out, folder, precision, floating),
        *(half_part, (8,), target, lambda line: None),
    )


def test_what_runs_in_bf16_has_files_of_its_own(float_build: Path, int8_build: Path, prepared: Preprocessor, tmp_path: Path) -> None:
    for folder, precision, names in (
        (float_build, "bf16", [HALVED, HALVED]),
        (int8_build, "int8", ["openvino.xml", "openvino.xml", HALVED]),
    ):
        out = tmp_path / precision
        out.mkdir()
        entries = list(build(request(folder, out, precision, half_part=precision == "int8")))
        assert [Path(str(entry.file)).name for entry in entries] == names
        assert entries[-1].float_precision == "bf16"
        halved = [out / HALVED, (out / HALVED).with_suffix(".bin")]
        assert entries[-1].size_bytes == sum(file.stat().st_size for file in halved)
        assert halved[1].stat().st_size < (folder / "openvino.bin").stat().st_size
        answers = []
        for path in (folder / "openvino.xml", halved[0]):
            spec = EngineSpec("openvino", "static", precision, "bf16", "cpu", 1, str(path), str(folder), (1,))
            answers.append(open_engine(spec).predict(prepared.encode(sentiment.rows(3), 16)))
        np.testing.assert_allclose(answers[1], answers[0], atol=0.05)
