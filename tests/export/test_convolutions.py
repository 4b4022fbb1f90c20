"""Models made of convolutions through quantize and export, in both engines of the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from export.builds import Build
from export.export import Export
from foundation.core.target import Target
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import load_quantization
from tests.architectures.steps import Bench, quantize
from tests.architectures.table import ARCHITECTURES
from tests.seldom import seldom

pytestmark = pytest.mark.usefixtures("engines_inside")

TARGET = Target(engines=("openvino", "onnxruntime"), batch_sizes=(1,), threads=1)


@pytest.mark.whole
@pytest.mark.parametrize("name", seldom(["resnet", "convnext"], ["convnext"]))
def test_engines_agree_with_torch_and_run_every_quantized_layer_in_int8(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.of(ARCHITECTURES[name], tmp_path)
    quantized = quantize(bench)
    context = replace(bench.context, target=TARGET, checkpoints={"quantize": quantized})
    monkeypatch.setattr("export.builds.planned", lambda *_: [Build("quantize", Checkpoint(quantized.path), "int8", "quantize")])
    out = bench.out("export")
    Export(float_precision="fp32").run(quantized, context, out)
    (build,) = json.loads((out / "export.json").read_text())["builds"]
    layers = set(load_quantization(quantized.path)[0])
    assert [(entry["engine"], entry["mode"]) for entry in build["engines"]] == [
        ("openvino", "static"),
        ("openvino", "dynamic"),
        ("onnxruntime", "dynamic"),
    ]
    for entry in build["engines"]:
        assert entry["parity"]["passed"], entry
        assert {layer["name"] for layer in entry["layers"] if layer["precision"] == "int8"} == layers
        assert {layer["precision"] for layer in entry["layers"]} == {"int8", "fp32"}
        total = sum(layer["macs"] for layer in entry["layers"])
        assert entry["int8_share"] == sum(layer["macs"] for layer in entry["layers"] if layer["name"] in layers) / total
