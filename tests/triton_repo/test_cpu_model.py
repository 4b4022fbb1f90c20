"""The model that runs in the server, with a stand-in for the server's Python module."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.standalone.adapted import with_adapter
from foundation.standalone.response import RESPONSES, placed
from foundation.standalone.windows import Window, read_contexts
from tests.triton_repo import tiny_exports as tiny
from tests.triton_repo.backend_stand_in import Tensor, TritonError, stand_in
from triton_repo import layout
from triton_repo.config import from_text
from triton_repo.cpu_engines.openvino import DIGEST_BYTES, KEPT, Engine, digest
from triton_repo.live import KEPT as NAMED

pytestmark = pytest.mark.whole


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Writes a repository, and loads the model out of it as the server would."""

    def load(preprocessor, rows, mode="static", pairs=False, batch_sizes=(1, 4), engine="openvino"):
        exported = tiny.export(tmp_path / "export", preprocessor, rows, mode=mode, engine=engine)
        models = layout.served_models(exported)
        layout.write_repository(tmp_path / "repository", models, pairs=pairs, batch_sizes=batch_sizes)
        folder = tmp_path / "repository" / "baseline-fp32"
        monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in())
        for name in ("preprocess", "long_text", "windows", "response", "engine", "openvino_request", "image", "sound", "adapted"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "path", list(sys.path))
        spec = importlib.util.spec_from_file_location("served_model", folder / "1" / "model.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "served_model", module)
        spec.loader.exec_module(module)
        for name in ("preprocess", *(["openvino_request"] if engine == "openvino" else [])):
            assert Path(sys.modules[name].__file__) == folder / "1" / f"{name}.py"
        for name in ("preprocess", "long_text", "windows", "response", "engine", "openvino_request", "image", "sound"):
            monkeypatch.delitem(sys.modules, name, raising=name not in ("openvino_request", "image", "sound"))
        model = module.TritonPythonModel()
        config = MessageToDict(from_text((folder / "config.pbtxt").read_text()), preserving_proto_field_name=True)
        model.initialize({"model_config": json.dumps(config)})
        if preprocessor.sounds is not None:  # imported as the preprocessor was loaded
            assert Path(sys.modules["sound"].__file__) == folder / "1" / "sound.py"
        return model

    return load


def request(*rows, name="TEXT"):
    """A request as the server gives it: bytes of shape [n, 1] for each input."""
    columns = {name: rows}
    if isinstance(name, tuple):
        columns = {key: [row[place] for row in rows] for place, key in enumerate(name)}
    elif rows and isinstance(rows[0], tuple):
        columns = {"TEXT": [row[0] for row in rows], "TEXT_PAIR": [row[1] for row in rows]}
    as_bytes = {key: [value if isinstance(value, bytes) else value.encode() for value in values] for key, values in columns.items()}
    return {key: Tensor(key, np.array([[value] for value in values], dtype=np.object_)) for key, values in as_bytes.items()}


def check(response, logits, preprocessor):
    assert response.error is None
    np.testing.assert_allclose(response.tensors["LOGITS"], logits, atol=1e-6)
    wanted = RESPONSES[preprocessor.response].of(logits, preprocessor.labels)
    assert response.tensors["LABEL"].tolist() == wanted["LABEL"].tolist()
    np.testing.assert_allclose(response.tensors["SCORE"], wanted["SCORE"], atol=1e-6)
    assert response.tensors["LOGITS"].dtype == response.tensors["SCORE"].dtype == np.float32


@pytest.mark.parametrize(("mode", "engine"), [("static", "openvino"), ("dynamic", "openvino"), ("dynamic", "onnxruntime")])
def test_every_request_gets_the_answers_of_its_rows(serve, mode, engine):
    prepared = tiny.text_preprocessor()
    model, logits = serve(prepared, tiny.TEXTS, mode, engine=engine), tiny.expected(prepared, tiny.TEXTS)
    responses = model.execute([request(*tiny.TEXTS[:3]), request(tiny.TEXTS[3]), request(*tiny.TEXTS[4:])])
    for response, part in zip(responses, (logits[:3], logits[3:4], logits[4:]), strict=True):
        check(response, part, prepared)


def test_rows_are_answered_by_the_adapter_that_they_name(serve):
    names, plain = ("legal", "medical", "none"), tiny.text_preprocessor()
    prepared = replace(plain, adapters=names, input_names=(*plain.input_names, "adapter_ids"))
    rows = [with_adapter(text, names[index % 3]) for index, text in enumerate(tiny.TEXTS)]
    model = serve(prepared, rows)
    named = [(str(row), row.adapter) for row in rows]
    logits = tiny.expected(plain, tiny.TEXTS) + np.arange(len(rows))[:, None] % 3
    good = [request(*named[:3], name=("TEXT", "ADAPTER")), request(*named[3:], name=("TEXT", "ADAPTER"))]
    bad = [request(("a", wrong), name=("TEXT", "ADAPTER")) for wrong in ("Legal", "", "legal\n")]
    responses = model.execute([good[0], *bad, request("a"), good[1]])  # one batch: what is refused leaves the others alone
    check(responses[0], logits[:3], prepared)
    check(responses[-1], logits[3:], prepared)
    for response in responses[1:-1]:
        assert all(name in str(response.error) for name in names)


AS_A_STUB = """
import importlib.util, sys
sys.path.insert(0, TESTS)
import backend_stand_in
sys.modules["triton_python_backend_utils"] = backend_stand_in.stand_in()
spec = importlib.util.spec_from_file_location("model", MODEL)
module = importlib.util.module_from_spec(spec)
sys.modules["model"] = module
spec.loader.exec_module(module)
module.TritonPythonModel().initialize({"model_config": CONFIG})
print(sys.getfilesystemencoding(), "ready")
"""


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_a_path_outside_ascii_behind_a_link_is_never_seen(engine, tmp_path):
    """The server's Python knows ASCII alone, and is given a path of links. Where they lead must not matter."""
    folder = tmp_path / "gr\u00f6\u00dfe"
    exported = tiny.export(folder / "export", tiny.text_preprocessor(), tiny.TEXTS, mode="dynamic", engine=engine)
    layout.write_repository(folder / "repository", layout.served_models(exported), pairs=False, batch_sizes=(1,))
    (tmp_path / "link").symlink_to(folder / "repository")
    model = tmp_path / "link" / "baseline-fp32"
    config = json.dumps(MessageToDict(from_text((model / "config.pbtxt").read_text()), preserving_proto_field_name=True))
    code = f"TESTS, MODEL, CONFIG = {str(Path(__file__).parent)!r}, {str(model / '1' / 'model.py')!r}, {config!r}\n{AS_A_STUB}"
    ascii_alone = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=ascii_alone, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("ascii ready\n", 0), done.stderr


def test_pairs(serve):
    prepared = tiny.text_preprocessor()
    [response] = serve(prepared, tiny.PAIRS, pairs=True).execute([request(*tiny.PAIRS)])
    check(response, tiny.expected(prepared, tiny.PAIRS), prepared)


def test_images(serve):
    prepared = tiny.image_preprocessor()
    responses = serve(prepared, tiny.IMAGES).execute([request(image, name="IMAGE") for image in tiny.IMAGES])
    logits = tiny.expected(prepared, tiny.IMAGES)
    for index, response in enumerate(responses):
        check(response, logits[index : index + 1], prepared)


def test_sounds(serve):
    prepared = tiny.sound_preprocessor()
    model, logits = serve(prepared, tiny.SOUNDS), tiny.expected(prepared, tiny.SOUNDS)
    responses = model.execute([request(*tiny.SOUNDS[:3], name="AUDIO"), request(tiny.SOUNDS[3], name="AUDIO")])  # two lengths in a request
    for response, part in zip(responses, (logits[:3], logits[3:]), strict=True):
        check(response, part, prepared)


def test_a_broken_sound_is_an_error_of_its_own_request(serve):
    prepared = tiny.sound_preprocessor()
    given = [tiny.SOUNDS[0], tiny.SOUNDS[1][:300], b"", b"ID3", tiny.SOUNDS[1]]
    responses = serve(prepared, tiny.SOUNDS).execute([request(sound, name="AUDIO") for sound in given])
    check(responses[0], tiny.expected(prepared, given[:1]), prepared)
    check(responses[4], tiny.expected(prepared, given[4:]), prepared)
    assert "row 0: a sound that ends too early" in str(responses[1].error)
    assert ["row 0: not a readable sound" in str(response.error) for response in responses[2:4]] == [True, True]
    assert {response.error.code for response in responses[1:4]} == {TritonError.INVALID_ARG}


def test_regression_answers_the_value(serve):
    prepared = tiny.text_preprocessor("text-regression")
    [response] = serve(prepared, tiny.TEXTS).execute([request("a fine film")])
    assert response.tensors["LABEL"].tolist() == [[b"score"]]
    assert response.tensors["SCORE"][0, 0] == response.tensors["LOGITS"][0, 0]


def test_a_question_is_answered_from_all_windows_of_its_context(serve):
    prepared = replace(tiny.text_preprocessor(), labels=("start", "end"), response="span", stride=2, null_threshold=0.5)
    contexts = [" ".join(["a very long and dull film"] * 20), "a fine film", "dull and fine " * 4]
    pairs = [("very fine", context) for context in contexts]
    windows = [Window.tokens(one.rows, prepared.tokenizer) for one in read_contexts(prepared, pairs)]
    assert [len(one) for one in windows] == [14, 1, 2]
    model = serve(prepared, list(read_contexts(prepared, pairs[1:2])[0].rows), batch_sizes=(1,))
    model.most_rows, predict, sizes = 4, model.engine.predict, []  # windows of one request exceed it
    model.engine.predict = lambda features: sizes.append(len(features["input_ids"])) or predict(features)
    names = ("QUESTION", "CONTEXT")
    both, alone = model.execute([request(*pairs[:2], name=names), request(("  very fine", contexts[2]), name=names)])
    for response, chosen in ((both, [0, 1]), (alone, [2])):
        assert response.error is None
        logits = response.tensors["LOGITS"]
        told = read_contexts(prepared, [pairs[number] for number in chosen])
        for number, values, one in zip(chosen, logits, told, strict=True):
            for row, read, ids in zip(one.rows, one.windows, windows[number], strict=True):
                [expected] = tiny.expected(prepared, [row])
                assert ids.shape[1] == read.length
                np.testing.assert_allclose(values[read.begin : read.begin + read.length], expected[: read.length], atol=1e-6)
            assert not values[one.windows[-1].begin + one.windows[-1].length :].any()
        assert max(sizes) == 4
        wanted = RESPONSES["span"].of(logits, prepared.labels, told)["ANSWER"]
        assert response.tensors["ANSWER"].tolist() == wanted.tolist()
        assert all(json.loads(row[0])["text"] in contexts[number] for number, row in zip(chosen, wanted.tolist(), strict=True))


def test_logits_that_are_no_numbers_fail_their_own_request(serve):
    prepared = replace(tiny.text_preprocessor(), labels=("start", "end"), response="span", stride=2)
    pair = ("very", "a fine film")
    model = serve(prepared, list(read_contexts(prepared, [pair])[0].rows), batch_sizes=(1,))
    predict = model.engine.predict
    model.engine.predict = lambda features: np.where(features["input_ids"][..., None] == 7, np.nan, predict(features)).astype(np.float32)
    good, bad = model.execute([request(one, name=("QUESTION", "CONTEXT")) for one in (pair, ("very", "a dull film"))])
    assert good.error is None
    assert "NaN or infinite" in str(bad.error)


@pytest.mark.parametrize(
    ("pair", "line"),
    [
        (("very " * 20, "a fine film"), "row 1: a question that takes 23 of the 16 tokens that are read"),
        (("very", " "), "row 1: a context without a token"),
        (("very", "a " * 40_000), "row 1: a text of 80000 characters; 65536 are allowed"),
    ],
)
def test_a_question_that_cannot_be_read_fails_alone(serve, pair, line):
    prepared = replace(tiny.text_preprocessor(), labels=("start", "end"), response="span", stride=2)
    first = ("very", "a fine film")
    model = serve(prepared, list(read_contexts(prepared, [first])[0].rows), batch_sizes=(1,))
    good, bad = model.execute([request(first, name=("QUESTION", "CONTEXT")), request(first, pair, name=("QUESTION", "CONTEXT"))])
    assert good.error is None
    assert line in str(bad.error)


def test_logits_of_all_tokens_come_with_the_entities_of_each_row(serve):
    prepared = replace(tiny.text_preprocessor(), labels=("O", "B-A", "I-A"), response="entities")
    rows = ["a fine film", "a very long and dull film and a very fine one"]  # of two lengths in one request
    long, short = serve(prepared, rows[:1]).execute([request(*rows), request(rows[0])])
    for response, found in ((long, rows), (short, rows[:1])):
        assert response.error is None
        logits = response.tensors["LOGITS"]
        assert logits.shape == (len(found), 16 if len(found) > 1 else 8, 3)
        for row, values in zip(found, logits, strict=True):
            [alone] = tiny.expected(prepared, [row])
            np.testing.assert_allclose(values[: len(alone)], alone, atol=1e-6)
            assert not values[len(alone) :].any()
        wanted = RESPONSES["entities"].of(logits, prepared.labels, placed(prepared, found))["ENTITIES"]
        assert response.tensors["ENTITIES"].tolist() == wanted.tolist()
        assert any(json.loads(row[0]) for row in wanted.tolist())


def test_a_bad_row_is_an_error_of_its_own_request(serve):
    prepared = tiny.text_preprocessor()
    responses = serve(prepared, tiny.TEXTS).execute([request("dull"), request("a", b"\xff\xfe"), request("fine")])
    assert str(responses[1].error) == "row 1: not UTF-8 text (byte 0)"
    assert responses[1].error.code == TritonError.INVALID_ARG
    check(responses[0], tiny.expected(prepared, ["dull"]), prepared)
    check(responses[2], tiny.expected(prepared, ["fine"]), prepared)


def test_a_far_too_long_text_is_answered_by_its_beginning_or_refused(serve):
    prepared = tiny.text_preprocessor()
    model = serve(prepared, tiny.TEXTS)
    long = "a fine film " * 20_000
    tokenizer, read = model.preprocessor.tokenizer, []
    one = lambda *texts: read.extend(map(len, texts)) or tokenizer.encode(*texts)  # noqa: E731
    many = lambda rows: read.extend(map(len, rows)) or tokenizer.encode_batch_fast(rows)  # noqa: E731
    object.__setattr__(model.preprocessor, "tokenizer", SimpleNamespace(encode=one, encode_batch_fast=many))
    responses = model.execute([request(long), request("x" * 70_000), request("fine")])
    check(responses[0], tiny.expected(prepared, [long]), prepared)
    wanted = (
        "row 0: a text of 70000 characters, which cannot be cut between two words: shorten it to what the model reads; 65536 are allowed"
    )
    assert (str(responses[1].error), responses[1].error.code) == (wanted, TritonError.INVALID_ARG)
    check(responses[2], tiny.expected(prepared, ["fine"]), prepared)
    assert sum(read) < 200


def test_a_broken_image_is_an_error_of_its_own_request(serve):
    prepared = tiny.image_preprocessor()
    given = [tiny.IMAGES[0], tiny.IMAGES[1][:40], b"", b"GIF89a"]
    responses = serve(prepared, tiny.IMAGES).execute([request(image, name="IMAGE") for image in given])
    check(responses[0], tiny.expected(prepared, given[:1]), prepared)
    assert [("not a readable image" in str(response.error)) for response in responses[1:]] == [True, True, True]


def test_a_failure_of_the_network_reaches_only_the_requests_of_that_shape(serve, monkeypatch):
    prepared = tiny.text_preprocessor()
    model = serve(prepared, tiny.TEXTS)
    predict = model.engine.predict

    def failing(features):
        if features["input_ids"].shape[1] == tiny.BUCKETS[1]:
            raise RuntimeError("no\nmemory")
        return predict(features)

    monkeypatch.setattr(model.engine, "predict", failing)
    responses = model.execute([request("dull"), request("a " * 14, "dull"), request("fine")])
    assert (str(responses[1].error), responses[1].error.code) == ("no memory", TritonError.INTERNAL)
    for response, row in ((responses[0], "dull"), (responses[2], "fine")):
        check(response, tiny.expected(prepared, [row]), prepared)


def test_answers_do_not_depend_on_company(serve):
    """Equal to the bit, whatever is merged with what."""
    prepared, random = tiny.text_preprocessor(), np.random.default_rng(0)
    model = serve(prepared, tiny.TEXTS, batch_sizes=(1, 2, 4))
    alone = [model.execute([request(row)])[0].tensors["LOGITS"][0] for row in tiny.TEXTS]
    for _ in range(5):
        order = random.integers(0, len(tiny.TEXTS), 11)
        responses = model.execute([request(tiny.TEXTS[index]) for index in order])
        for index, response in zip(order, responses, strict=True):
            assert (response.tensors["LOGITS"][0] == alone[index]).all()


def test_everything_is_compiled_before_the_first_request(serve):
    model = serve(tiny.text_preprocessor(), tiny.TEXTS)
    assert sorted(model.engine._requests) == [(1, 8), (1, 16), (4, 8), (4, 16)]
    model.execute([request(*tiny.TEXTS * 3)])
    assert len(model.engine._requests) == 4


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A network, and a folder with all that the first start compiled of it."""
    root = tmp_path_factory.mktemp("kept")
    folder = tiny.export(root, tiny.text_preprocessor(), tiny.TEXTS).path / "baseline-fp32"
    (root / "networks").mkdir()
    first = started(folder, root / "networks")
    assert len(first._requests) == 4
    assert sorted(path.name for path in (root / "networks").iterdir()) == sorted(
        f"{n}x{length}.network" for n in (1, 4) for length in (8, 16)
    )
    return folder, root / "networks", first.predict(features())


def test_the_service_names_the_folder_as_the_engine_does():
    assert NAMED == KEPT


def started(folder, kept, kind=Engine):
    engine = kind(folder, "static", (1, 4), {**tiny.PROPERTIES, KEPT: str(kept)})
    engine.prepare([(bucket,) for bucket in tiny.BUCKETS])
    return engine


def features():
    return tiny.text_preprocessor().encode(["a fine film"] * 6)


def eventually(true):
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Reads(Engine):
    """Compiles nothing."""

    def _network_of(self, shape, kept):
        assert kept is not None, shape
        return super()._network_of(shape, kept)


def test_kept_networks_are_read_and_larger_ones_later(filled):
    """A later start has the batches of one row, answers with them alone, and gets the others."""
    folder, kept, expected = filled
    going = threading.Event()

    class Held(Reads):
        """Waits before it reads what is larger than one row."""

        def _whole(self, shape):
            assert shape[0] == 1 or going.wait(30)
            return super()._whole(shape)

    later = started(folder, kept, Held)
    assert sorted(later._requests) == [(1, 8), (1, 16)]
    assert (later.predict(features()) == expected).all()
    going.set()
    eventually(lambda: len(later._requests) == 4)
    assert (later.predict(features()) == expected).all()


def test_a_network_that_is_read_is_the_one_that_was_compiled(filled):
    folder, kept, _ = filled
    plain = Engine(folder, "static", (1, 4), tiny.PROPERTIES)
    read, compiled = (engine._network_of((4, 8), whole) for engine in (plain, started(folder, kept)) for whole in [engine._whole((4, 8))])
    for name in compiled.get_property("SUPPORTED_PROPERTIES"):
        assert str(read.get_property(name)) == str(compiled.get_property(name)), name


@pytest.mark.first(1)
@pytest.mark.parametrize("damage", ["bit", "short", "empty", "absent", "other shape"])
@pytest.mark.parametrize("shape", ["1x8", "4x16"])
def test_a_damaged_network_is_compiled_and_kept_again(filled, tmp_path, damage, shape):
    folder, kept, expected = filled
    copied = tmp_path / "networks"
    shutil.copytree(kept, copied)
    file = copied / f"{shape}.network"
    whole = file.read_bytes()
    if damage == "absent":
        file.unlink()
    else:
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 1
        file.write_bytes({"bit": changed, "short": whole[:-1], "empty": b"", "other shape": (kept / "1x16.network").read_bytes()}[damage])
    engine = started(folder, copied)
    eventually(lambda: len(engine._requests) == 4)
    assert (engine.predict(features()) == expected).all()
    eventually(lambda: {path.name for path in copied.iterdir()} == {path.name for path in kept.iterdir()})
    content = file.read_bytes()
    assert content[-DIGEST_BYTES:] == digest(file.name, content[:-DIGEST_BYTES])
    again = started(folder, copied, Reads)
    eventually(lambda: len(again._requests) == 4)


def test_a_full_disk_keeps_no_model_from_answering(filled, tmp_path, capsys):
    folder, _, expected = filled
    engine = started(folder, tmp_path / "absent")
    assert (engine.predict(features()) == expected).all()
    assert capsys.readouterr().err.count("the compiled network is not kept: ") == 4


@given(rows=st.integers(1, 70), sizes=st.sets(st.integers(2, 32), max_size=4))
@settings(max_examples=25, deadline=None)
def test_rows_are_cut_into_compiled_sizes(rows, sizes):
    sizes = sizes | {1}
    spans = list(Engine.spans(rows, sorted(sizes, reverse=True)))
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(rows))
    lengths = [stop - start for start, stop in spans]
    assert set(lengths) <= sizes
    assert lengths == sorted(lengths, reverse=True)
