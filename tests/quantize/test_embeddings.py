"""Int8 rows of embeddings and head: rounded to their grids, stored, counted, and read as integers by the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from export.generation.codes import insert_tables
from export.generation.genai_folder import with_integers
from export.generation.on_grids import on_grids
from export.stored_weights import integer_weights
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.models.checkpoint import load, load_float
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.tables import KEY, load_tables, on_table_grid, row_scale, table_codes, table_modules
from quantize.embeddings import quantize_tables
from quantize.quantize import Quantize
from tests.export.generation.test_agreement import context
from tests.export.generation.test_codes import FLOAT, logits
from tests.export.generation.tiny_decoders import VOCABULARY, decoder
from tests.problems import raises_problem

pytestmark = pytest.mark.whole


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31), st.floats(-6, 6))
def test_rows_are_those_of_a_loop(rows: int, width: int, seed: int, size: float) -> None:
    random = np.random.default_rng(seed)
    table = (random.standard_normal((rows, width)) * 10.0**size).astype(np.float32)
    table[random.integers(rows)] = 0
    expected = np.zeros_like(table)
    for row, values in enumerate(table):
        step = np.float32(np.abs(values).max() / np.float32(127))
        for column, value in enumerate(values):
            expected[row, column] = 0 if step == 0 else np.float32(np.clip(np.rint(value / step), -127, 127)) * step
    scale = row_scale(torch.from_numpy(table))
    found = on_table_grid(torch.from_numpy(table), scale).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-12)
    assert np.abs(found - table).max() <= np.abs(table).max() / 254 * 1.001
    codes = table_codes(torch.from_numpy(found), scale)
    np.testing.assert_array_equal(codes.float().numpy() * scale[:, None].numpy(), found)


@pytest.mark.parametrize(("kind", "tables"), [("gpt2", ["transformer.wte"]), ("llama", ["model.embed_tokens", "lm_head"])])
def test_a_tied_head_is_one_table_with_the_embeddings(kind: str, tables: list[str]) -> None:
    model: Any = decoder(kind)
    assert list(table_modules(model)) == tables
    scales, noise = quantize_tables(model)
    assert list(scales) == list(noise) == tables
    assert all(ratio is not None and ratio > 30 for ratio in noise.values())
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (len(tables) == 1)


@pytest.fixture(scope="module", params=["w8a8", "w4a16"])
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    given = context("gpt2", folder)
    stage = Quantize(scheme=request.param, embeddings=True, group_size=16, calibration={"rows": 32})  # type: ignore[arg-type]
    out = folder / "out"
    out.mkdir()
    figures = stage.run(Artifact(given.baseline.path, {"id": "baseline", "digest": ""}), given, out)
    assert figures["tables"]["transformer.wte"] > 30
    assert figures["float_layers"] == {}
    return out


def test_the_checkpoint_lists_its_tables_and_loads_anywhere(quantized: Path) -> None:
    assert json.loads((quantized / "quantization.json").read_text())[KEY] == ["transformer.wte"]
    assert load_quantization(quantized)[1] == {}
    [scale] = load_tables(quantized).values()
    model: Any = load(quantized)
    table = model.get_input_embeddings().weight.detach()
    torch.testing.assert_close(on_table_grid(table, scale), table, rtol=1e-6, atol=0)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_the_engine_reads_the_rows_as_integers_and_answers_as_torch(quantized: Path) -> None:
    graph = with_integers(on_grids(Checkpoint(quantized)))
    ids = np.random.default_rng(0).integers(3, 300, (2, 9))
    with torch.no_grad():
        expected = load(quantized)(input_ids=torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(logits(graph, ids), expected, atol=5e-5 * np.abs(expected).max())
    told = [
        (str(node.get_rt_info()["layerType"].value), [value.get_element_type().get_type_name() for value in node.input_values()])
        for node in openvino.Core().compile_model(graph, "CPU", FLOAT).get_runtime_model().get_ops()
    ]
    heads = [types[:2] for kind, types in told if kind == "FullyConnected" and types[0] == "f32" and types[1] != "i4"]
    if any(types[:2] == ["i8", "i8"] for kind, types in told if kind == "FullyConnected"):
        assert heads == [["f32", "f32"]]  # beside static int8 OpenVINO makes the table float again: once it does not, say so
    else:
        assert heads == [["f32", "i8"]]
        assert [types[0] for kind, types in told if kind == "Gather" and "f32" in types[3:]] == ["i8"]  # the look-up, with its scales


def test_the_file_holds_all_but_the_positions_as_integers(quantized: Path, tmp_path: Path) -> None:
    openvino.save_model(with_integers(on_grids(Checkpoint(quantized))), tmp_path / "model.xml", compress_to_fp16=False)
    positions, integers = 16 * 32, 300 * 32 + 2 * 12 * 32 * 32
    assert integer_weights([tmp_path / "model.xml"]) == pytest.approx(integers / (integers + positions))


def test_scales_of_another_table_are_refused() -> None:
    from export.generation.cached_graph import cached_graph

    with pytest.raises(ValueError, match="other: no table of the graph is on the grid"):
        insert_tables(cached_graph(decoder("llama")), {"other": torch.rand(VOCABULARY) + 0.1})


def test_tables_are_for_language_models(tmp_path: Path) -> None:
    with raises_problem("embeddings", "true", "text-classification", "text-generation"):
        Quantize(embeddings=True).check(None, None, context("gpt2", tmp_path, task="text-classification"))


def test_damaged_scales_are_one_line(quantized: Path, tmp_path: Path) -> None:
    for name in ("quantization.json", "quantization.safetensors"):
        (tmp_path / name).write_bytes((quantized / name).read_bytes())
    document = json.loads((tmp_path / "quantization.json").read_text())
    (tmp_path / "quantization.json").write_text(json.dumps({**document, KEY: ["nothing"]}))
    with pytest.raises(InputError, match="quantize again"):
        load_tables(tmp_path)
    assert load_float(quantized) is not None
