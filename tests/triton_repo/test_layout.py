import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.measure.fastest import Candidate, Ranked
from foundation.standalone import image, long_text, openvino_request, preprocess, response, windows
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import RESPONSES
from tests.triton_repo import tiny_exports as tiny
from triton_repo import layout
from triton_repo.config import from_text

NAMES = ("variant", "precision", "float_precision", "engine", "mode")


def write(root: Path, preprocessor: Preprocessor, rows, **settings):
    exported = tiny.export(root / "export", preprocessor, rows, (("baseline", "fp32"), ("quantize", "int8")))
    given = {"pairs": False, "batch_sizes": (1, 4), **settings}
    return layout.write_repository(root / "repository", layout.served_models(exported), **given)


def test_every_model_stands_on_its_own(tmp_path):
    write(tmp_path, tiny.text_preprocessor(), tiny.TEXTS)
    repository = tmp_path / "repository"
    assert sorted(path.name for path in repository.iterdir()) == ["README.md", "baseline-fp32", "quantize-int8"]
    for name in ("baseline-fp32", "quantize-int8"):
        version = repository / name / "1"
        names = [
            "engine.py",
            "long_text.py",
            "model.py",
            "openvino.bin",
            "openvino.xml",
            "openvino_request.py",
            "preprocess.json",
            "preprocess.py",
            "response.py",
            "settings.json",
            "tokenizer.json",
            "windows.py",
        ]
        assert sorted(path.name for path in version.iterdir()) == names
        for module in (preprocess, long_text, response, windows, openvino_request):
            assert (version / Path(module.__file__).name).read_bytes() == Path(module.__file__).read_bytes()
        assert from_text((repository / name / "config.pbtxt").read_text()).name == name
        assert not any(path.is_symlink() for path in (repository / name).rglob("*"))


def test_a_model_of_onnx_runtime_brings_its_weights(tmp_path):
    exported = tiny.export(tmp_path / "export", tiny.text_preprocessor(), tiny.TEXTS, mode="dynamic", engine="onnxruntime")
    [settings] = layout.write_repository(tmp_path / "repository", layout.served_models(exported), pairs=False, batch_sizes=(1,))
    version = tmp_path / "repository" / "baseline-fp32" / "1"
    names = {path.name for path in version.iterdir()}
    assert {"engine.py", "model.onnx", "model_uint8.onnx.data"} <= names
    assert not any(name.startswith("openvino") for name in names)
    assert (settings.engine, settings.mode, settings.properties) == ("onnxruntime", "dynamic", tiny.SESSION)


def test_what_was_chosen_takes_its_engine_and_mode_and_the_others_the_default(tmp_path):
    def entry(engine, mode, rest="fp32"):
        return {"engine": engine, "mode": mode, "runnable": True, "float_precision": rest, "file": f"{engine}-{mode}-{rest}"}

    entries = [entry("onnxruntime", "dynamic"), entry("openvino", "static"), entry("openvino", "static", "bf16")]
    builds = [
        {"variant": name, "precision": precision, "float_precision": "fp32", "folder": name, "engines": entries}
        for name, precision in (("baseline", "fp32"), ("quantize", "int8"))
    ]
    (tmp_path / "export.json").write_text(json.dumps({"builds": builds}))
    for key in (("quantize", "int8", "bf16", "openvino", "static"), ("baseline", "fp32", "fp32", "onnxruntime", "dynamic")):
        chosen = Ranked(Candidate(key, 0.9, 1, {}), (), 1.0)
        found = {model.variant: model for model in layout.served_models(Artifact(tmp_path, {}), chosen=chosen)}
        assert tuple(found[key[0]].names[name] for name in NAMES) == key
        other = found[({"baseline", "quantize"} - {key[0]}).pop()]
        assert (other.engine.engine, other.engine.float_precision) == ("openvino", "fp32")


def test_batch_sizes(tmp_path):
    [first, _] = write(tmp_path, tiny.text_preprocessor(), tiny.TEXTS, batch_sizes=(4, 16))
    assert (first.max_batch_size, first.batch_sizes) == (16, (1, 4, 16))


def test_batch_sizes_stay_within_a_given_maximum(tmp_path):
    [first, _] = write(tmp_path, tiny.text_preprocessor(), tiny.TEXTS, batch_sizes=(4, 16), max_batch_size=4)
    assert (first.max_batch_size, first.batch_sizes) == (4, (1, 4))


def test_at_least_eight_rows(tmp_path):
    assert write(tmp_path, tiny.text_preprocessor(), tiny.TEXTS, batch_sizes=(2,))[0].max_batch_size == 8


@pytest.mark.parametrize("pairs", [False, True])
def test_warm_up_rows_fill_their_buckets(tmp_path, pairs):
    prepared = tiny.text_preprocessor()
    write(tmp_path, prepared, tiny.TEXTS, pairs=pairs)
    folder = tmp_path / "repository" / "baseline-fp32" / "warmup"
    for bucket in tiny.BUCKETS:
        data = (folder / f"{bucket}.TEXT").read_bytes()
        assert int.from_bytes(data[:4], "little") == len(data) - 4
        text = data[4:].decode()
        row = (text, "") if pairs else text
        assert prepared.encode([row], 0)["input_ids"].shape == (1, bucket)
        assert (folder / f"{bucket}.TEXT_PAIR").exists() == pairs


def test_warm_up_image_can_be_decoded():
    [(name, data)] = layout.warm_up_rows(tiny.image_preprocessor(), False)
    assert name == "image"
    assert image.decode_image(data).size == (tiny.SIDE, tiny.SIDE)


def test_images_without_a_fixed_size_are_refused():
    with pytest.raises(InputError, match="to a fixed size"):
        list(layout.warm_up_rows(tiny.image_preprocessor(size={"shortest_edge": 8}), False))


def test_the_recommended_mode_is_served(tmp_path):
    exported = tiny.export(tmp_path, tiny.text_preprocessor(), tiny.TEXTS)
    document = json.loads((tmp_path / "export.json").read_text())
    engines = document["builds"][0]["engines"]
    engines.append({**engines[1], "mode": "dynamic"})
    engines.insert(1, {**engines[1], "mode": "other", "runnable": False})
    (tmp_path / "export.json").write_text(json.dumps(document))
    assert [model.engine.mode for model in layout.served_models(exported)] == ["static"]


def test_nothing_to_serve(tmp_path):
    (tmp_path / "export.json").write_text(json.dumps({"builds": [{"variant": "a", "precision": "fp32", "folder": "a", "engines": []}]}))
    with pytest.raises(InputError, match="no engine of openvino or onnxruntime was built"):
        layout.served_models(Artifact(tmp_path, {}))


@pytest.mark.parametrize("name", RESPONSES)
def test_readme_names_the_outputs_of_its_models_alone(name, monkeypatch):
    monkeypatch.setattr(layout, "_build_of", lambda model: model.name)
    model = SimpleNamespace(
        name="a", response=name, inputs=["TEXT"], adapters=(), max_batch_size=8, engine="openvino", mode="static", width=3
    )
    text = layout.readme([model])
    own = {output.name for output in RESPONSES[name].outputs(3)}
    every = {output.name for other in RESPONSES.values() for output in other.outputs(3)}
    assert {output for output in every if f"`{output}`" in text} == own


def test_readme_shows_how_to_ask(tmp_path):
    write(tmp_path, tiny.text_preprocessor(), tiny.TEXTS, pairs=True)
    text = (tmp_path / "repository" / "README.md").read_text()
    assert "[n, 1]: UTF-8 text." in text
    assert '"TEXT": "a fine film", "TEXT_PAIR": "a good movie"' in text
    assert "| `quantize-int8` (serve this one) | TEXT, TEXT_PAIR | 8 | OpenVINO, static |" in text
