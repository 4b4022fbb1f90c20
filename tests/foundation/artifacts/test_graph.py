"""ONNX files: a structure says all but the contents of weights, is read anew when its file changes, and a whole model is its caller's."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from foundation.artifacts.graph import CONTENTS, SMALL, Graph


def write(path: Path, sizes: list[int], seed: int, external: bool) -> onnx.ModelProto:
    """Writes a graph that adds constants of these sizes to its input; returns what was written."""
    random = np.random.default_rng(seed)
    constants = [
        numpy_helper.from_array(random.standard_normal(size).astype(np.float32), f"c{number}") for number, size in enumerate(sizes)
    ]
    names = ["x", *(f"y{number}" for number in range(len(sizes)))]
    nodes = [helper.make_node("Add", [names[number], f"c{number}"], [names[number + 1]], f"add{number}") for number in range(len(sizes))]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (names[0], names[-1])]
    model = helper.make_model(helper.make_graph(nodes, "graph", values[:1], values[1:], constants))
    whole = onnx.ModelProto.FromString(model.SerializeToString())
    path.with_name("weights").unlink(missing_ok=True)
    onnx.save_model(model, str(path), save_as_external_data=external, location="weights" if external else None, size_threshold=0)
    return whole


@settings(max_examples=8)
@given(st.lists(st.tuples(st.lists(st.integers(1, 600), min_size=1, max_size=3), st.booleans()), min_size=1, max_size=4))
def test_a_structure_says_all_but_the_contents_of_weights(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[list[int], bool]]
) -> None:
    path = tmp_path_factory.mktemp("graphs") / "model.onnx"
    for seed, (sizes, external) in enumerate(written):
        whole = write(path, sizes, seed, external)
        found = Graph(path).structure
        assert [node.SerializeToString() for node in found.node] == [node.SerializeToString() for node in whole.graph.node]
        assert [(one.name, one.data_type, list(one.dims)) for one in found.initializer] == [
            (one.name, one.data_type, list(one.dims)) for one in whole.graph.initializer
        ]
        for held, given_, size in zip(found.initializer, whole.graph.initializer, sizes, strict=True):
            if not external and 4 * size < SMALL // 2:
                assert np.array_equal(numpy_helper.to_array(held), numpy_helper.to_array(given_))
            assert sum(len(getattr(held, field)) for field in CONTENTS) <= 1024
        loaded = Graph(path).load()
        assert [numpy_helper.to_array(one).tolist() for one in loaded.graph.initializer] == [
            numpy_helper.to_array(one).tolist() for one in whole.graph.initializer
        ]
        del loaded.graph.node[:]
        assert len(Graph(path).structure.node) == len(Graph(path).load().graph.node) == len(sizes)


def test_a_structure_is_parsed_once_for_all_objects_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model.onnx", [4, 400], 0, external=False)
    monkeypatch.setattr("foundation.core.stamps.SETTLED_NS", 0)
    first = Graph(tmp_path / "model.onnx").structure
    monkeypatch.delattr(onnx, "load")
    assert Graph(tmp_path / "model.onnx").structure.node == first.node


def test_nothing_holds_a_loaded_model(tmp_path: Path) -> None:
    write(tmp_path / "model.onnx", [400], 0, external=True)
    graph = Graph(tmp_path / "model.onnx")
    loaded = graph.load()
    assert sys.getrefcount(loaded) == 2  # this name, and the argument
    assert [one.data_location for one in graph.load(external=False).graph.initializer] == [TensorProto.EXTERNAL]
