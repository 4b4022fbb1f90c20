"""`compress bench --server` as a user meets it: python -m pytest tests/triton_repo/load/test_bench_server.py"""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import cli
from compress.api import load_test
from compress.reading.load import load_data
from compress.recipe import check, dump
from foundation.core.errors import InputError
from foundation.machine import environment
from tests.tiny_recipes import tiny_vit
from tests.triton_repo import tiny_exports as tiny
from tests.triton_repo.load.fake_server import TEXT, Fake, serving
from triton_repo.load.settings import Load

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("generator_inside")]

PAIRS = {"TEXT": ("BYTES", [-1, 1]), "TEXT_PAIR": ("BYTES", [-1, 1])}


def bench(*arguments: str, given: str | bytes | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["bench", *arguments], input=given)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "rows.txt").write_text("a fine film\ndull\n")
    return str(tmp_path / "rows.txt")


@pytest.mark.slow
def test_a_table_and_a_file_of_figures(tmp_path, texts):
    with serving(Fake()) as fake:
        out = tmp_path / "load.json"
        status, printed, errors = bench(
            "--server",
            fake.grpc_address,
            "--data",
            texts,
            "--rate",
            "20",
            "--rate",
            "60",
            "--seconds",
            "0.5",
            "--seed",
            "2",
            "--json",
            str(out),
        )
    assert (status, errors) == (0, "")
    first, head, *lines = printed.splitlines()
    assert first == f"grpc://{fake.grpc_address}, model m: 2 rows (single texts) of {texts}"
    assert head.startswith("load ")
    assert [line[:8] for line in lines[:2]] == ["rate 20 ", "rate 60 "]
    assert all(line.startswith("warning: rate ") for line in lines[2:-1])
    assert lines[-1] == f"figures: {out}"
    found = json.loads(out.read_text())
    assert (found["schema"], found["server"], found["protocol"], found["model"]) == (1, fake.grpc_address, "grpc", "m")
    assert (found["data"], found["rows"], found["row_bytes"]["max"]) == (texts, 2, 11)
    assert [(one["rate"], one["seed"], one["seconds"]) for one in found["loads"]] == [(20.0, 2, 0.5), (60.0, 2, 0.5)]
    assert found["environment"] == json.loads(json.dumps(environment.fingerprint()))


def test_standard_input_over_http_at_one_request_after_the_other():
    with serving(Fake()) as fake:
        status, printed, errors = bench(
            "--server", f"http://{fake.http_address}", "--data", "-", "--seconds", "0.2", "--rows", "3", given="a\nn\u00e4h\r\n\nb\n"
        )
    assert (status, errors) == (0, "")
    assert printed.splitlines()[2].startswith("concurrency 1 ")
    rows = {row for request in fake.requests for row in request["TEXT"]}
    assert rows == {b"a", "n\u00e4h".encode(), b"", b"b"}
    assert fake.most == 1


def test_questions_are_sent_with_their_contexts(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "a ?", "context": "b"}\n' * 3)
    inputs = {"QUESTION": ("BYTES", [-1, 1]), "CONTEXT": ("BYTES", [-1, 1])}
    with serving(Fake({"m": inputs})) as fake:
        status, _, errors = bench("--server", fake.grpc_address, "--data", str(tmp_path / "rows.jsonl"), "--seconds", "0.1")
        assert (status, errors) == (0, "")
        assert fake.requests[0] == {"QUESTION": [b"a ?"], "CONTEXT": [b"b"]}


def test_pairs_by_their_columns(tmp_path):
    (tmp_path / "pairs.csv").write_text("sentence1,sentence2,label\na,b,1\n")
    given = ("--data", str(tmp_path / "pairs.csv"), "--seconds", "0.1")
    with serving(Fake({"m": PAIRS})) as fake:
        status, _, errors = bench("--server", fake.grpc_address, *given, "--column", "sentence1", "--column", "sentence2")
        assert (status, errors) == (0, "")
        assert fake.requests[0] == {"TEXT": [b"a"], "TEXT_PAIR": [b"b"]}
        status, _, errors = bench("--server", fake.grpc_address, *given, "--column", "sentence1")
        assert (status, errors) == (2, "--column: 1 given, but model m reads TEXT and TEXT_PAIR; give one for each\n")
        status, _, errors = bench("--server", fake.grpc_address, *given)
        assert status == 2
        assert errors.startswith(f"{tmp_path / 'pairs.csv'}: no column 'text'; available: 'sentence1', 'sentence2', 'label'")
        assert errors.endswith("set --column\n")
        status, _, errors = bench("--server", fake.grpc_address, "--data", "-", given="x\n")
        assert (status, errors.split(";")[0]) == (2, "--data -: lines of standard input are single texts")


def test_images_of_a_folder(tmp_path):
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "one.png").write_bytes(tiny.IMAGES[0])
    with serving(Fake({"m": {"IMAGE": ("BYTES", [-1, 1])}})) as fake:
        status, _, errors = bench("--server", fake.grpc_address, "--data", str(tmp_path), "--seconds", "0.1")
    assert (status, errors) == (0, "")
    assert fake.requests[0] == {"IMAGE": [tiny.IMAGES[0]]}


def test_the_evaluation_rows_of_a_run(monkeypatch):
    """With the recipe of a run in the place of its folder; the slow test of the page on the Python API asks a real one."""
    finished = check({**tiny_vit("tiny"), "stages": [{"finetune": {"epochs": 1}}]})
    monkeypatch.setattr("compress.run.opened.opened", lambda folder: SimpleNamespace(recipe=dump(finished)))
    rows = load_data(finished.data, finished.model.task, None, lambda line: None).evaluation.rows
    with serving(Fake({"m": {"IMAGE": ("BYTES", [-1, 1])}})) as fake:
        status, printed, errors = bench("runs/tiny", "--server", fake.grpc_address, "--seconds", "0.1")
    assert (status, errors) == (0, "")
    assert f"model m: {len(rows)} rows (encoded images) of the evaluation split of runs/tiny" in printed
    assert {image for request in fake.requests for image in request["IMAGE"]} <= set(rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "bench: give a run folder alone, or --server URL"),
        (("somewhere", "--rate", "5"), "bench: give a run folder alone, or --server URL"),
        (("somewhere", "--seconds", "5"), "bench: give a run folder alone, or --server URL"),
        (("--server", "a:1"), "--server: give the rows to send: a run folder"),
        (("somewhere", "--server", "a:1", "--data", "x"), "--server: give the rows to send: a run folder"),
        (("--server", "a:1", "--data", "x", "--rate", "1", "--concurrency", "1"), "--rate and --concurrency given"),
        (("--server", "a:1", "--data", "x", "--rate", "0"), "rate: 0.0 given; 0.001 to 1000000 is allowed"),
        (("--server", "a:1", "--data", "x", "--json", "absent/load.json"), "--json absent/load.json: there is no folder absent"),
        (("--server", "ftp://a:1", "--data", "x"), "protocol ftp; grpc, grpcs, http and https are allowed"),
        (("--server", "a:1", "--ca", "x", "--data", "x"), "--ca x: given for a server without TLS"),
    ],
)
def test_wrong_input_is_one_line(arguments, words):
    status, _, errors = bench(*arguments)
    assert (status, len(errors.splitlines())) == (2, 1)
    assert words in errors


def test_data_that_are_none(tmp_path):
    with serving(Fake({"m": TEXT, "other": TEXT})) as fake:
        for arguments, given, words in (
            (("--data", str(tmp_path / "absent.jsonl")), None, "absent.jsonl: cannot be read"),
            (("--data", "-"), b"", "-: empty file"),
            (("--data", "-"), b"\xff\n", "- row 1: byte 0xff at position 1 is not UTF-8"),
        ):
            status, _, errors = bench("--server", fake.grpc_address, "--model", "m", *arguments, given=given)
            assert (status, len(errors.splitlines())) == (2, 1)
            assert words in errors
        status, _, errors = bench("--server", fake.grpc_address, "--data", "-", given="x\n")
        assert (status, errors) == (2, f"--server grpc://{fake.grpc_address}: give --model; ready: m, other\n")


def test_the_python_function(texts):
    with serving(Fake()) as fake:
        found = load_test(fake.grpc_address, data=texts, loads=[Load(concurrency=2, seconds=0.2)])
        assert (found["model"], found["loads"][0]["concurrency"]) == ("m", 2)
        with pytest.raises(InputError, match="give the rows to send"):
            load_test(fake.grpc_address)
        with pytest.raises(InputError, match="loads: none given"):
            load_test(fake.grpc_address, data=texts, loads=[])
