import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from export.engines.spec import EngineSpec
from export.engines.worker import synthetic
from foundation.machine.process import environment
from foundation.measure.engine_process import EngineError, EngineProcess
from foundation.measure.predictions import predict
from foundation.measure.samples import is_undisturbed
from foundation.models.checkpoint import load
from foundation.standalone.preprocess import Preprocessor
from tests.export import sentiment
from tests.export import tiny_checkpoints as tiny

pytestmark = pytest.mark.whole

NOISY = """
import os, sys
print("before the protocol")
import export.engines.onnxruntime as module
class Noisy(module.OnnxRuntime):
    def predict(self, features):
        print("a library talks", flush=True)
        os.system("echo and its child too")
        return super().predict(features)
module.OnnxRuntime = Noisy
from export.engines.worker import main
sys.stdout.flush()
main()
"""


@dataclass(frozen=True)
class NoisySpec(EngineSpec):
    """An engine that writes to standard output."""

    @property
    def command(self) -> list[str]:
        return [*super().command[:2], "-c", NOISY.replace('print("before the protocol")', "")]


@pytest.fixture(scope="module")
def spec(float_build: Path) -> EngineSpec:
    return EngineSpec("onnxruntime", "dynamic", "fp32", "fp32", "cpu", 1, str(float_build / "model.onnx"), str(float_build), (1, 4))


@pytest.fixture(scope="module")
def ort(spec: EngineSpec) -> Iterator[EngineProcess]:
    with EngineProcess(spec) as process:
        yield process


def test_predictions_come_in_the_order_of_the_rows(ort: EngineProcess, prepared: Preprocessor) -> None:
    rows = sentiment.rows(23)  # of both buckets, mixed
    expected = predict(load(sentiment.checkpoint()), prepared, rows, 1)
    for batch_size in (1, 4, 50):
        answer = ort.predict(rows, batch_size)
        assert (answer.dtype, answer.shape) == (np.float32, (23, 2))
        np.testing.assert_allclose(answer, expected, atol=1e-5)


def test_it_says_which_library_it_runs(ort: EngineProcess) -> None:
    assert ort.versions == {"onnxruntime": onnxruntime.__version__}


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_no_other_library_starts_threads_beside_an_engine(name: str) -> None:
    loaded = "[m for m in ('torch', 'transformers', 'sklearn') if m in sys.modules]"
    code = f"import sys, export.engines.worker, export.engines.{name}; print({loaded})"
    shown = subprocess.run([sys.executable, "-P", "-c", code], env=environment(), capture_output=True, check=True).stdout
    assert shown.split() == [b"[]"]


@pytest.mark.parametrize(("least", "most", "seconds", "count"), [(5, 9, 0.0, 5), (2, 9, 60.0, 9)])
def test_samples_are_counted(ort: EngineProcess, least: int, most: int, seconds: float, count: int) -> None:
    answer = ort.ask("measure", batch=2, sequence=8, least=least, most=most, seconds=seconds)
    undisturbed = sum(is_undisturbed(wall, waited) for wall, waited in zip(answer["samples_ms"], answer["waited_ms"], strict=True))
    assert undisturbed == count or len(answer["samples_ms"]) == 2 * count
    assert len(answer["cpu_ms"]) == len(answer["samples_ms"])
    assert all(sample > 0 for sample in answer["samples_ms"])
    assert answer["peak_memory_bytes"] > 10 * 2**20


def test_an_error_comes_back_and_the_worker_goes_on(ort: EngineProcess) -> None:
    with pytest.raises(EngineError, match=r"onnxruntime dynamic fp32: FileNotFoundError: .*nowhere"):
        ort.ask("predict", rows="/nowhere", out="/nowhere", batch_size=1)
    with pytest.raises(EngineError, match="KeyError: 'sing'"):
        ort.ask("sing")
    assert len(ort.predict(["good"], 1)) == 1


def test_its_process_imports_nothing_that_only_recipes_need() -> None:
    code = "import sys, export.engines.worker; assert not {'pydantic', 'torch', 'transformers'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[3], check=True)


def test_a_missing_model_is_one_line(float_build: Path) -> None:
    spec = EngineSpec("openvino", "static", "fp32", "fp32", "cpu", 1, "/no/such/model.xml", str(float_build))
    with pytest.raises(EngineError, match=r"^openvino static fp32: RuntimeError: .*/no/such/model.xml.*$"):
        EngineProcess(spec)


def test_what_libraries_print_stays_off_the_channel(spec: EngineSpec) -> None:
    with EngineProcess(NoisySpec(**spec.message())) as process:
        assert process.predict(["good", "bad film"], 2).shape == (2, 2)
        assert "a library talks" in Path(process._files.name, "stderr").read_text()


def test_answers_that_are_not_finite_are_refused(ort: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.float32([[0, 1], [np.nan, 0], [0, np.inf]])
    monkeypatch.setattr("foundation.measure.engine_process.load_file", lambda _: {"logits": logits})
    with pytest.raises(EngineError, match=r"logits of 2 of 3 rows are NaN .* first in row 1"):
        ort.predict(["a"] * 3, 4)


def test_made_up_texts_are_legal_and_unpadded(prepared: Preprocessor) -> None:
    features = synthetic(prepared, 5, 13)
    assert list(features) == list(prepared.input_names)
    assert all(array.shape == (5, 13) and array.dtype == np.int64 for array in features.values())
    ids = features["input_ids"]
    assert prepared.pad_token_id not in ids
    assert 0 <= ids.min() < ids.max() < len(sentiment.SPECIALS + sentiment.WORDS)
    assert (features["attention_mask"] == 1).all()
    logits = load(sentiment.checkpoint())(**{name: torch.from_numpy(array) for name, array in features.items()}).logits
    assert torch.isfinite(logits).all()


def test_made_up_images_have_the_size_of_the_model() -> None:
    features = synthetic(tiny.preprocessor("vit"), 3, None)
    assert list(features) == ["pixel_values"]
    assert (features["pixel_values"].shape, features["pixel_values"].dtype) == ((3, 3, 12, 12), np.float32)
