"""The graphs that tests share are those of the same weights, read in the same way."""

from pathlib import Path

import pytest

from compress.standalone.preprocess import Preprocessor
from export.graph import onnx, quantized
from tests.traced_once import traced_once


def test_a_graph_is_traced_anew_where_anything_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Path] = []

    def export(checkpoint: Path, preprocessor: Preprocessor, out: Path, all_tokens: bool) -> Path:
        traced.append(checkpoint)
        out.write_text(f"{(checkpoint / 'model.safetensors').read_text()} {preprocessor.buckets} {all_tokens}")
        return out

    monkeypatch.setattr(onnx, "export_float", export)
    folders = [tmp_path / name for name in ("one", "alike", "other")]
    for folder, weights in zip(folders, ("1", "1", "2"), strict=True):
        folder.mkdir()
        (folder / "model.safetensors").write_text(weights)
    short, long = (Preprocessor("text", ("input_ids",), (), "text-classification", 16, buckets) for buckets in ((8, 16), (16,)))
    with traced_once():
        for number, (folder, preprocessor, all_tokens) in enumerate(
            [
                (folders[0], short, False),
                (folders[1], short, False),
                (folders[2], short, False),
                (folders[0], long, False),
                (folders[0], short, True),
            ]
        ):
            out = quantized.export_float(
                folder, preprocessor, tmp_path / "out" / f"{number}.onnx" if number == 1 else tmp_path / "x", all_tokens
            )
            assert out.read_text() == f"{(folder / 'model.safetensors').read_text()} {preprocessor.buckets} {all_tokens}"
    assert traced == [folders[0], folders[2], folders[0], folders[0]]
