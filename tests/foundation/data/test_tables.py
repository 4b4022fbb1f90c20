"""Tables against what Python's own tools read from them, and more than forty files that no reader may accept."""

import csv
import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from compress.reading.load import load_data
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.tables import Column, Table, read_table
from foundation.labels.tasks import Task

ROWS = [("plain", "0"), ('quotes " and , commas', "1"), ("", "0"), ("caf\u00e9 \u2028 \x0b \x85 \U0001f600", "1")]


def read(path: Path, columns: tuple[Column, ...] = ("text", "label"), header: bool = True) -> list[tuple[object, ...]]:
    return [cells for _, cells in read_table(Table(path, columns, header))]


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def tsv_text(rows: list[tuple[str, str]]) -> str:
    return "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows)


def csv_text(rows: list[tuple[str, str]]) -> str:
    file = io.StringIO(newline="")
    csv.writer(file).writerows([("text", "label"), *rows])
    return file.getvalue()


def objects(rows: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"label": label, "more": "x", "text": text} for text, label in rows]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("ending", ["tsv", "txt", "csv", "jsonl", "json", "TSV"])
def test_every_text_format_gives_the_same_rows(tmp_path: Path, ending: str, zipped: bool, mark: bytes) -> None:
    lines = "".join(json.dumps(entry) + "\n" for entry in objects(ROWS))
    contents = {"csv": csv_text(ROWS), "jsonl": lines, "json": json.dumps(objects(ROWS), ensure_ascii=False)}
    data = mark + contents.get(ending, tsv_text(ROWS)).encode()
    path = tmp_path / (f"train.{ending}" + (".gz" if zipped else ""))
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert read(path) == ROWS


def test_parquet_in_several_batches(tmp_path: Path) -> None:
    rows = [(f"text {i}", i % 3) for i in range(10_000)]
    table = pyarrow.table({"more": [0.5] * len(rows), "label": [label for _, label in rows], "text": [text for text, _ in rows]})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet", row_group_size=3000)
    (tmp_path / "zipped.parquet.gz").write_bytes(gzip.compress((tmp_path / "train.parquet").read_bytes()))
    for name in ("train.parquet", "zipped.parquet.gz"):
        assert read(tmp_path / name) == rows
    assert [number for number, _ in read_table(Table(tmp_path / "train.parquet", ("text",)))] == list(range(1, 10_001))


def test_columns_by_position(tmp_path: Path) -> None:
    path = tmp_path / "test.tsv"
    path.write_text("a\t0.5\tx y\n\tb\t2\tlicence\tmore\n")
    assert read(path, (2, 1), header=False) == [("x y", "0.5"), ("2", "b")]
    path.write_text("first\tfirst\na\tb\n")
    assert read(path, (1, 0)) == [("b", "a")]


def test_line_numbers_count_the_lines_of_quoted_fields(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text('text,label\r\n"two\r\nlines",0\r\nnext,1\r\n')
    assert list(read_table(Table(path, ("text", "label")))) == [(2, ("two\r\nlines", "0")), (4, ("next", "1"))]


def test_line_ends_and_blank_lines_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_bytes(b"text\tlabel\r\na\t0\r\nb\t1\r\n\r\n\n")
    assert read(path) == [("a", "0"), ("b", "1")]
    path.write_bytes(b"text\tlabel\na\t0\nb\t1")
    assert read(path) == [("a", "0"), ("b", "1")]


def test_long_fields(tmp_path: Path) -> None:
    rows = [("word " * 200_000, "0")]
    for ending, text in (("tsv", tsv_text(rows)), ("csv", csv_text(rows)), ("jsonl", json.dumps(objects(rows)[0]))):
        (tmp_path / f"train.{ending}").write_text(text)
        assert read(tmp_path / f"train.{ending}") == rows


@given(
    st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r")), st.sampled_from("01")), min_size=1, max_size=5
    )
)
def test_any_csv_and_json_comes_back(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "any.csv").write_bytes(csv_text(rows).encode())
    (folder / "any.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in objects(rows)))
    assert read(folder / "any.csv") == rows
    assert read(folder / "any.jsonl") == rows


@given(st.binary(max_size=60), st.sampled_from(["csv", "tsv", "jsonl", "json", "parquet", "tsv.gz", "parquet.gz"]))
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, data: bytes, ending: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"noise.{ending}"
    path.write_bytes((b"text\tlabel\n" if ending == "tsv" else b"") + data)
    problems: tuple[str, ...] = ()
    try:
        read(path)
    except InputError as error:
        problems = error.lines
    assert all(str(path) in problem and "\n" not in problem for problem in problems)


def archive(*members: tuple[str, bytes], link: str | None = None) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as out:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
        if link:
            info = tarfile.TarInfo("train/a/link.png")
            info.type, info.linkname = tarfile.SYMTYPE, link
            out.addfile(info)
    return file.getvalue()


def damaged_header() -> bytes:
    """An archive of two images, the header of the second damaged: tarfile alone takes it for the end."""
    data = bytearray(gzip.decompress(archive(("train/a/0.png", PNG), ("train/b/0.png", PNG))))
    start = data.index(b"train/b")
    data[start + 150] ^= 0xFF
    return bytes(data)


GOOD = b"text\tlabel\n" + b"".join(b"text %d\t%d\n" % (i, i % 2) for i in range(20))
PNG = png()
TSV = "train.tsv"
TEXT_FILES: list[tuple[str, bytes, str]] = [
    (TSV, b"", "empty file"),
    (TSV, b"text\tlabel\n", "no rows"),
    (TSV, b"text\tlabel\na\t0\nb\n", "line 3: 1 tab-separated field; 2, as in the header"),
    (TSV, b"text\tlabel\na\t0\textra\n", "line 2: 3 tab-separated fields; 2"),
    (TSV, b"text\tlabel\na\t0\n\nb\t1\n", "line 3: a blank line"),
    (TSV, b"Text\tlabel\na\t0\nb\t1\n", "no column 'text'; available: 'Text', 'label'; did you mean 'Text'?"),
    (TSV, b"sentence\tlabels\na\t0\n", "no column 'label'; available: 'sentence', 'labels'; did you mean 'labels'?"),
    (TSV, b"text\ttext\tlabel\na\tb\t0\n", "2 columns are named 'text'"),
    (TSV, b"text\tlabel\na\t0\nna\xefve\t1\n", "line 3: byte 0xef at position 3 is not UTF-8"),
    (TSV, "text\tlabel\na\t0\n".encode("utf-16"), "line 1: byte 0xff at position 1 is not UTF-8"),
    (TSV, b"text\tlabel\na\t\nb\t1\n", "line 2: no label"),
    (TSV, b"text\tlabel\na\t0\nb\t0\n", "all 2 train rows have the label '0'"),
    (TSV, b"text\tlabel\na\t-1\nb\t-1\n", "all labels are -1"),
    (TSV, b"text\tlabel\n" + b"".join(b"%d\tunique %d\n" % (i, i) for i in range(30)), "30 different labels in 30 train rows"),
    ("train.tsv.gz", gzip.compress(GOOD)[:-9], "cannot be read"),
    ("train.tsv.gz", GOOD, "cannot be read (Not a gzipped file"),
    ("train.tsv.gz", gzip.compress(GOOD)[:20] + b"\xff" * 30, "cannot be read"),
    ("train.csv", b'text,label\n"a,0\nb,1\n', "line 2: a field begins with a quote that is never closed; csv is read as in RFC 4180"),
    ("train.csv", b'text,label\n"a "b" c",0\n', 'double those in it: "a ""fine"" film"'),
    ("train.csv", b"text,label\na, b,0\n", 'a field with commas stands in quotes: "well, fine"'),
    (TSV, b"0\ta fine film\n", "set data.header: false, and columns to positions counted from 0"),
    ("train.csv", b'text,label\n"a"b,0\n', "line 2: ',' expected after"),
    ("train.csv", b"text,label\na, b,0\n", "line 2: 3 comma-separated fields; 2"),
    ("train.csv", b"text,label\ra,0\rb,1\r", "line 1: new-line character seen in unquoted field"),
    ("train.jsonl", b'{"text": "a", "label": 0}\n{"text": "b" "label": 1}\n', "line 2: not JSON"),
    ("train.jsonl", b'{"text": "a", "label": 0}\n[1]\n', "line 2: a JSON list"),
    ("train.jsonl", b'{"text": "a", "label": 0}\n{"text": "b"}\n', "line 2: no column 'label'; available: 'text'"),
    ("train.jsonl", b'{"text": "a", "label": 0}\n{"text": 5, "label": 1}\n', "line 2: 5 given as text"),
    ("train.jsonl", b'{"text": "a", "label": 0}\n{"text": null, "label": 1}\n', "line 2: None given as text"),
    ("train.jsonl", b'{"text": "\\ud800", "label": 0}\n', "line 1: '\\ud800' given as text"),
    ("train.jsonl", b'{"text": "a", "label": null}\n', "line 1: no label (None)"),
    ("train.jsonl", b"[" * 100_000 + b"\n", "line 1: not JSON"),
    ("train.json", b'{"text": ["a"], "label": [0]}', "a JSON dict; a list of objects is allowed"),
    ("train.json", b'[{"text": "a", "label": 0}, "b"]', "row 2: a JSON str"),
    ("train.json", b"[]", "no rows"),
    ("train.parquet", b"PAR1 and no more", "not a readable parquet file"),
    ("train.parquet.gz", gzip.compress(b""), "not a readable parquet file"),
    ("train.xlsx", b"PK", "no train split, only test.tsv, train.xlsx"),
]
IMAGE_FILES: list[tuple[str, bytes, str]] = [
    ("train.tar.gz", b"no archive", "not a complete tar archive"),
    ("train.tar", b"", "not a complete tar archive"),
    ("train.tar.gz", archive(("train/a/0.png", PNG))[:-30], "not a complete tar archive"),
    ("train.tar.gz", archive(), "contains no images"),
    ("train.tar", gzip.decompress(archive(("train/a/0.png", PNG), ("train/a/1.png", PNG)))[:3072], "neither a header nor the end"),
    ("train.tar", damaged_header(), "neither a header nor the end"),
    ("train.tar.gz", archive(("train/a/0.png", PNG[:60])), "member train/a/0.png: not a readable image"),
    ("train.tar.gz", archive(("train/a/0.png", b"")), "member train/a/0.png: not a readable image"),
    ("train.tar.gz", archive(("train/a/notes.txt", b"hello")), "member 'train/a/notes.txt': not the name of an image"),
    ("train.tar.gz", archive(("../../etc/a/0.png", PNG)), "path outside the archive"),
    ("train.tar.gz", archive(("/etc/a/0.png", PNG)), "path outside the archive"),
    ("train.tar.gz", archive(link="/etc/passwd"), "a link or device"),
    ("train.tar.gz", archive(("0.png", PNG)), "not in a class folder"),
    ("train.tar.gz", archive(("extra/a/0.png", PNG)), "'extra' is not a split"),
    ("train/a/0.png", PNG[:60], "train/a/0.png: not a readable image"),
    ("train/a/0.bmp", PNG, "train/a/0.bmp: not the name of an image"),
    ("train/0.png", PNG, "train/0.png: not in a class folder"),
    ("train.jsonl", b'{"image": "gone.png", "label": 0}\n', "train.jsonl line 1: image 'gone.png' cannot be read"),
    ("train.jsonl", b'{"image": 5, "label": 0}\n', "train.jsonl line 1: int given as image"),
]


def write(folder: Path, name: str, data: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def refused(load: Callable[[], object], name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load()
    assert len(caught.value.lines) >= 1
    assert any(message in problem for problem in caught.value.lines), caught.value.lines
    for problem in caught.value.lines:
        assert name.split("/")[0] in problem
        assert "\n" not in problem
        assert len(problem) < 600


@pytest.mark.parametrize(("name", "data", "message"), TEXT_FILES, ids=[message for _, _, message in TEXT_FILES])
def test_malformed_text_files(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    write(tmp_path, name, data)
    write(tmp_path, "test.tsv", GOOD)
    refused(lambda: load_data(DataConfig(path=str(tmp_path)), "text-classification", None, print), name, message)


@pytest.mark.parametrize(("name", "data", "message"), IMAGE_FILES, ids=[f"{name} {message}" for name, _, message in IMAGE_FILES])
def test_malformed_image_sets(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    write(tmp_path, name, data)
    refused(lambda: load_data(DataConfig(path=str(tmp_path)), "image-classification", None, print), name, message)


@pytest.mark.parametrize("label", ["nan", "inf", "-inf", "1e39", "five", "", "1_000", "1,5"])
def test_labels_that_are_no_numbers(tmp_path: Path, label: str) -> None:
    write(tmp_path, "train.tsv", GOOD + f"bad\t{label}\n".encode())
    write(tmp_path, "test.tsv", GOOD)
    config = DataConfig(path=str(tmp_path))
    refused(lambda: load_data(config, "text-regression", None, print), "train.tsv", "train.tsv line 22: label")


@pytest.mark.parametrize("label", ["2", "-1", "yes", "1.5", "0 0"])
def test_labels_that_train_does_not_have(tmp_path: Path, label: str) -> None:
    write(tmp_path, "train.tsv", GOOD)
    write(tmp_path, "test.tsv", GOOD + f"bad\t{label}\n".encode())
    config = DataConfig(path=str(tmp_path))
    message = f"test.tsv line 22: label {label!r}; allowed by the train split: 0, 1"
    refused(lambda: load_data(config, "text-classification", None, print), "test.tsv", message)


def test_all_files_are_reported_at_once(tmp_path: Path) -> None:
    write(tmp_path, "train.tsv", b"text\tlabel\na\n")
    write(tmp_path, "dev.tsv", b"")
    with pytest.raises(InputError) as caught:
        load_data(DataConfig(path=str(tmp_path)), "text-classification", None, print)
    assert len(caught.value.lines) == 2


def test_many_bad_rows_are_counted_not_listed(tmp_path: Path) -> None:
    write(tmp_path, "train.tsv", GOOD)
    write(tmp_path, "test.tsv", b"text\tlabel\n" + b"a\t7\n" * 50)
    with pytest.raises(InputError) as caught:
        load_data(DataConfig(path=str(tmp_path)), "text-classification", None, print)
    assert len(caught.value.lines) == 3
    assert caught.value.lines[-1].endswith("(and 47 more rows like these)")


def test_a_field_too_many_is_found_without_a_header_only_where_it_matters(tmp_path: Path) -> None:
    write(tmp_path, "train.tsv", b"a\t0\nb\n")
    files = {"train": {"file": "train.tsv", "header": False, "columns": {"text": 0, "label": 1}}, "test": "train.tsv"}
    with pytest.raises(InputError, match=r"train.tsv line 2: 1 tab-separated .*; at least 2"):
        load_data(DataConfig.model_validate({"path": str(tmp_path), "files": files}), "text-classification", None, print)


def test_names_need_a_header_and_positions_a_place(tmp_path: Path) -> None:
    write(tmp_path, "train.tsv", GOOD)
    with pytest.raises(InputError, match="column 'text' given with header: false"):
        read(tmp_path / "train.tsv", header=False)
    with pytest.raises(InputError, match="no column 7; allowed: 0 to 1"):
        read(tmp_path / "train.tsv", (0, 7))
    write(tmp_path, "train.jsonl", b"{}\n")
    with pytest.raises(InputError, match=r"column 0 given; a .jsonl file has column names"):
        read(tmp_path / "train.jsonl", (0, 1))


def test_the_key_header_stands_at_data_too(tmp_path: Path) -> None:
    for name in ("train.csv", "test.csv"):
        write(tmp_path, name, "".join(f"{split},{name} {split}\n" for split in (0, 1) * 5).encode())
    given: dict[str, Any] = {"path": str(tmp_path), "header": False, "columns": {"text": 1, "label": 0}}
    data = load_data(DataConfig.model_validate(given), "text-classification", None, print)
    assert (len(data.evaluation), data.evaluation.rows[0]) == (10, "test.csv 0")  # the first line is a row
    write(tmp_path, "test.csv", b"label,text\n0,a\n1,b\n")
    files = {"train": "train.csv", "test": {"file": "test.csv", "header": True}}
    data = load_data(DataConfig.model_validate({**given, "files": files}), "text-classification", None, print)
    assert list(data.evaluation.rows) == ["a", "b"]  # a file says otherwise
    with pytest.raises(InputError) as caught:
        load_data(DataConfig.model_validate({"path": str(tmp_path), "header": False}), "text-classification", None, print)
    assert all("column" in line and "set data.columns" in line for line in caught.value.lines)


@pytest.mark.parametrize(("key", "value"), [("header", False), ("quoting", "minimal")])
def test_keys_of_tables_that_no_file_reads_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", b'{"text": "a", "label": 0}\n')
    for path in (str(tmp_path), "owner/name", "sklearn:digits"):
        task: Any = "image-classification" if ":" in path else "text-classification"
        with pytest.raises(InputError, match=f"data.{key}: .* given, but {path} has no .*tsv"):
            load_data(DataConfig.model_validate({"path": path, key: value}), task, None, print)


def test_a_misspelt_column_is_no_missing_header(tmp_path: Path) -> None:
    write(tmp_path, "train.tsv", b"Text\tlabel\na\t0\n")
    with pytest.raises(InputError) as caught:
        load_data(DataConfig(path=str(tmp_path)), "text-classification", None, print)
    assert "header" not in caught.value.lines[0]


@pytest.mark.parametrize("ends", ["\n", ""])
def test_lines_of_objects_in_a_json_file_get_a_hint(ends: str, tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(row) for row in objects(ROWS)) + ends
    (tmp_path / "train.json").write_text(lines, encoding="utf-8")
    for columns in (("text", "label"), ("sentence", "label")):
        with pytest.raises(InputError, match=r"train.json: one JSON object per line; .*name the file .jsonl"):
            read(tmp_path / "train.json", columns)
    (tmp_path / "train.json").write_text("[1,\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"train.json: not JSON"):
        read(tmp_path / "train.json")


@pytest.mark.parametrize("split", [None, "train"])
@pytest.mark.parametrize("task", ["text-classification", "image-classification", "sentence-embedding"])
def test_a_folder_of_arrow_files_says_what_to_do(split: str | None, task: Task, tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    data: Any = Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    (data if split is None else DatasetDict({split: data})).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match=r"data.path: .*saved: a .* in Arrow files, as save_to_disk .*load_from_disk.*to_parquet"):
        load_data(DataConfig(path=str(tmp_path / "saved"), max_length=8), task, None, lambda line: None, None)
