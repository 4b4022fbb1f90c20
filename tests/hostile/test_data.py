"""Tables, images and archives that cannot be right: each is refused in one line that names the file."""

import gzip
import io
import json
import os
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from compress.reading.load import load_data
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from tests.hostile.lines import one_line
from tests.problems import raises_problem

TEXT, IMAGE, PLAIN = "text-classification", "image-classification", "text-generation"


def load(path: Path | str, task: str = TEXT, **config: Any) -> Any:
    return load_data(DataConfig.model_validate({"path": str(path), **config}), task, None, lambda line: None)


def refused(path: Path | str, *named: str, task: str = TEXT, **config: Any) -> None:
    with pytest.raises(InputError) as caught:
        load(path, task, **config)
    one_line(caught.value, *named)


GOOD = b"text,label\n" + b"".join(b"row %d,%d\n" % (row, row % 2) for row in range(40))
TABLES: list[tuple[str, str, bytes]] = [
    ("nothing", "csv", b""),
    ("only a mark", "csv", b"\xef\xbb\xbf"),
    ("only a header", "csv", b"text,label\n"),
    ("only blank lines", "csv", b"\n\n\n"),
    ("no label column", "csv", b"text,other\na,1\n"),
    ("two label columns", "csv", b"text,label,label\na,1,2\n"),
    ("a field less", "csv", GOOD + b"x\n"),
    ("a field more", "csv", GOOD + b"x,1,2\n"),
    ("an open quote", "csv", GOOD + b'"x,1\n'),
    ("a quote inside", "csv", GOOD + b'x"y"z,"1"2\n'),
    ("a blank line between", "csv", GOOD + b"\nx,1\n"),
    ("UTF-16", "csv", "text,label\na,1\n".encode("utf-16")),
    ("Latin-1", "csv", GOOD + b"\xe9,1\n"),
    ("a surrogate", "csv", GOOD + "\ud800,1\n".encode("utf-8", "surrogatepass")),
    ("a label of 5,000 digits", "csv", GOOD + b"x," + b"9" * 5000 + b"\n"),
    ("a label of a megabyte", "csv", GOOD + b"x," + b"y" * 10**6 + b"\n"),
    ("NaN as a label", "csv", GOOD + b"x,nan\n"),
    ("NAN as a label", "csv", GOOD + b"x,NAN\n"),
    ("infinity as a label", "csv", GOOD + b"x,-inf\n"),
    ("no label", "csv", GOOD + b"x,\n"),
    ("blank as a label", "csv", GOOD + b"x,   \n"),
    ("NUL in a label", "csv", GOOD + b"x,\x00\n"),
    ("a line break in a label", "csv", GOOD + b'x,"a\nb"\n'),
    ("one class", "csv", b"text,label\n" + b"x,1\n" * 40),
    ("a class for each row", "csv", b"text,label\n" + b"".join(b"x,%d\n" % row for row in range(40))),
    ("binary", "csv", bytes(range(256)) * 20),
    ("NUL as header", "csv", b"\x00,\x00\n1,2\n"),
    ("a long header", "csv", b",".join(b"c%d" % number for number in range(20_000)) + b"\n"),
    ("only a header", "tsv", b"text\tlabel\n"),
    ("commas", "tsv", b"text,label\na,1\n"),
    ("Latin-1", "tsv", b"text\tlabel\n\xff\t1\n"),
    ("a field more", "tsv", b"text\tlabel\na\t1\t2\n"),
    ("nothing", "jsonl", b""),
    ("no JSON", "jsonl", b"text"),
    ("an open brace", "jsonl", b'{"text": "a", "label": 1'),
    ("a list", "jsonl", b"[1]"),
    ("a number", "jsonl", b"7"),
    ("no text", "jsonl", b'{"label": 1}'),
    ("null as text", "jsonl", b'{"text": null, "label": 1}'),
    ("a number as text", "jsonl", b'{"text": 1, "label": 1}'),
    ("a list as text", "jsonl", b'{"text": ["a"], "label": 1}'),
    ("a surrogate as text", "jsonl", b'{"text": "\\ud800", "label": 1}'),
    ("NaN as a label", "jsonl", b'{"text": "a", "label": NaN}\n{"text": "b", "label": 1}'),
    ("infinity as a label", "jsonl", b'{"text": "a", "label": -Infinity}\n{"text": "b", "label": 1}'),
    ("too large a label", "jsonl", b'{"text": "a", "label": 1e999}\n{"text": "b", "label": 1}'),
    ("null as a label", "jsonl", b'{"text": "a", "label": null}\n{"text": "b", "label": 1}'),
    ("a list as a label", "jsonl", b'{"text": "a", "label": [1]}\n{"text": "b", "label": 1}'),
    ("a map as a label", "jsonl", b'{"text": "a", "label": {"a": 1}}\n{"text": "b", "label": 1}'),
    ("a surrogate as a label", "jsonl", b'{"text": "a", "label": "\\ud800"}\n{"text": "b", "label": 1}'),
    ("4,000 digits as a label", "jsonl", b'{"text": "a", "label": ' + b"9" * 4000 + b'}\n{"text": "b", "label": 1}'),
    ("6,000 digits as a label", "jsonl", b'{"text": "a", "label": ' + b"9" * 6000 + b"}"),
    ("deep", "jsonl", b"[" * 100_000),
    ("deep maps", "jsonl", b'{"a":' * 100_000),
    ("a blank line between", "jsonl", b'{"text": "a", "label": 1}\n\n{"text": "b", "label": 0}'),
    ("a map", "json", b'{"text": "a"}'),
    ("a list of numbers", "json", b"[1, 2]"),
    ("an empty list", "json", b"[]"),
    ("deep", "json", b"[" * 100_000),
    ("cut off", "json", b'[{"text": "a", "label": 1},'),
    ("nothing", "parquet", b""),
    ("text", "parquet", b"text,label\na,1\n"),
    ("only the marks", "parquet", b"PAR1PAR1"),
    ("a wrong footer", "parquet", b"PAR1" + b"\xff" * 100 + struct.pack("<I", 10**9) + b"PAR1"),
    ("not gzip", "csv.gz", GOOD),
    ("cut off", "csv.gz", gzip.compress(GOOD)[:-9]),
    ("a wrong checksum", "csv.gz", gzip.compress(GOOD)[:-8] + bytes(8)),
    ("half a header", "csv.gz", b"\x1f\x8b"),
    ("another method", "csv.gz", b"\x1f\x8b\x07" + bytes(20)),
    ("damaged", "csv.gz", gzip.compress(GOOD)[:30] + b"\xff" * 50),
    ("not parquet", "parquet.gz", gzip.compress(b"x" * 100)),
    ("an unknown format", "xlsx", b"PK"),
    ("no extension", "", b"x"),
]


@pytest.mark.parametrize(("ending", "content"), [case[1:] for case in TABLES], ids=[f"{name} ({ending})" for name, ending, _ in TABLES])
def test_a_table_that_cannot_be_right(ending: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / ("rows." + ending if ending else "rows")
    path.write_bytes(content)
    refused(path, str(path))


def parquet(path: Path, columns: dict[str, Any], names: list[str] | None = None) -> Path:
    arrays = [value if isinstance(value, pyarrow.Array) else pyarrow.array(value) for value in columns.values()]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, names=names or list(columns)), path, version="2.6")
    return path


BROKEN_TEXT = pyarrow.Array.from_buffers(
    pyarrow.string(), 2, [None, pyarrow.py_buffer(struct.pack("<3i", 0, 1, 2)), pyarrow.py_buffer(b"\xffa")]
)
PARQUET: list[tuple[str, dict[str, Any], list[str] | None]] = [
    ("two equal columns", {"a": ["x", "y"], "b": ["x", "y"], "c": [0, 1]}, ["text", "text", "label"]),
    ("two equal label columns", {"a": ["x", "y"], "b": [1, 0], "c": [0, 1]}, ["text", "label", "label"]),
    ("text that is not UTF-8", {"text": BROKEN_TEXT, "label": [0, 1]}, None),
    ("no rows", {"text": pyarrow.array([], pyarrow.string()), "label": pyarrow.array([], pyarrow.int64())}, None),
    ("no text", {"label": [0, 1]}, None),
    ("numbers as text", {"text": [1, 2], "label": [0, 1]}, None),
    ("bytes as text", {"text": [b"a", b"b"], "label": [0, 1]}, None),
    ("lists as text", {"text": [["a"], ["b"]], "label": [0, 1]}, None),
    ("null as text", {"text": ["a", None], "label": [0, 1]}, None),
    ("null as a label", {"text": ["a", "b"], "label": [0, None]}, None),
    ("NaN as a label", {"text": ["a", "b"], "label": [0.0, float("nan")]}, None),
    ("infinity as a label", {"text": ["a", "b"], "label": [0.0, float("inf")]}, None),
    ("bytes as a label", {"text": ["a", "b"], "label": [b"x", b"y"]}, None),
    ("lists as a label", {"text": ["a", "b"], "label": [[0], [1]]}, None),
    ("maps as a label", {"text": ["a", "b"], "label": [{"a": 0}, {"a": 1}]}, None),
    ("times beyond the calendar", {"text": ["a", "b"], "label": pyarrow.array([2**62, 0], pyarrow.timestamp("us"))}, None),
]


@pytest.mark.parametrize(("columns", "names"), [case[1:] for case in PARQUET], ids=[case[0] for case in PARQUET])
def test_a_parquet_file_that_cannot_be_right(columns: dict[str, Any], names: list[str] | None, tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows.parquet", columns, names)
    refused(path, str(path))


def test_compressed_files_expand_up_to_a_limit_that_the_recipe_can_raise(tmp_path: Path) -> None:
    rows = b"text,label\n" + b"".join(b"%d %s,%d\n" % (row, b"x" * 1000, row % 2) for row in range(2000))
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(rows))
    words = "expands to more than 0.001 GB; if the file is meant to, raise data.max_expanded_gb, or give it uncompressed"
    refused(tmp_path / "rows.csv.gz", "rows.csv.gz", words, max_expanded_gb=0.001)
    assert len(load(tmp_path / "rows.csv.gz", max_expanded_gb=0.003).train) > 1000
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b" " * 3 * 10**6))
    refused(tmp_path / "rows.jsonl.gz", words, max_expanded_gb=0.001)
    (tmp_path / "rows.txt.gz").write_bytes(gzip.compress(b"a" * 3 * 10**6))
    with pytest.raises(InputError, match=r"data.max_expanded_gb"):
        load_data(
            DataConfig(path=str(tmp_path / "rows.txt.gz"), max_expanded_gb=0.001), PLAIN, None, lambda line: None, tokenizer="./absent"
        )
    same = pyarrow.array(["x" * 1000] * 3000)
    for text in (same, same.dictionary_encode()):
        path = parquet(tmp_path / "rows.parquet", {"text": text, "label": [0, 1] * 1500})
        assert path.stat().st_size < 50_000
        refused(path, words, max_expanded_gb=0.001)
    with tarfile.open(tmp_path / "images.tar.gz", "w:gz") as archive:
        add(archive, "train/a/.hidden", bytes(3 * 10**6))
        add(archive, "train/a/x.png", png())
    refused(tmp_path / "images.tar.gz", words, task=IMAGE, max_expanded_gb=0.001)


def test_extra_text_has_the_limit_without_a_key(tmp_path: Path) -> None:
    from foundation.data.compressed import Limit
    from foundation.data.tables import read_document

    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a" * 10**6))
    with raises_problem("a.txt.gz", "0.0001 GB", "give it uncompressed"):
        read_document(tmp_path / "a.txt.gz", Limit(0.0001))
    assert len(read_document(tmp_path / "a.txt.gz")) == 10**6


def add(archive: tarfile.TarFile, name: str, data: bytes, **fields: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in fields.items():
        setattr(member, key, value)
    archive.addfile(member, io.BytesIO(data))


def png(size: tuple[int, int] = (4, 4), mode: str = "L") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.zeros(size, np.uint8 if mode == "L" else np.uint16)).save(file, "PNG")
    return file.getvalue()


def chunked(width: int, height: int) -> bytes:
    """Returns a PNG whose header names a size that its data lacks."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\x00" * 10)) + chunk(b"IEND", b"")


IMAGES: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("text", b"no image"),
    ("only a signature", b"\x89PNG\r\n\x1a\n"),
    ("cut off", png((64, 64))[:-20]),
    ("a wrong checksum", png()[:40] + b"\xff" * 4 + png()[44:]),
    ("a bomb", chunked(60_000, 60_000)),
    ("a size of 0", chunked(0, 4)),
    ("less data than the size", chunked(400, 400)),
    ("16 bits", png(mode="I;16")),
    ("another format", b"GIF89a" + bytes(30)),
    ("half a JPEG", b"\xff\xd8\xff\xe0" + bytes(30)),
    ("random", bytes(np.random.default_rng(0).integers(0, 256, 300, np.uint8))),
]


@pytest.mark.parametrize("content", [content for _, content in IMAGES], ids=[name for name, _ in IMAGES])
@pytest.mark.parametrize("where", ["folder", "tar", "jsonl", "parquet"])
def test_an_image_that_is_none(content: bytes, where: str, tmp_path: Path) -> None:
    if where == "folder":
        for split, name, data in (("train", "x.png", content), ("test", "y.png", png())):
            (tmp_path / "data" / split / "a").mkdir(parents=True)
            (tmp_path / "data" / split / "a" / name).write_bytes(data)
        refused(tmp_path / "data", "x.png", task=IMAGE)
    elif where == "tar":
        with tarfile.open(tmp_path / "rows.tar", "w") as archive:
            add(archive, "train/a/x.png", content)
        refused(tmp_path / "rows.tar", "x.png", task=IMAGE)
    elif where == "jsonl":
        (tmp_path / "x.png").write_bytes(content)
        (tmp_path / "rows.jsonl").write_text(json.dumps({"image": "x.png", "label": "a"}))
        refused(tmp_path / "rows.jsonl", "rows.jsonl line 1", task=IMAGE)
    else:
        path = parquet(tmp_path / "rows.parquet", {"image": [content], "label": ["a"]})
        refused(path, "rows.parquet row 1", task=IMAGE)


CELLS = [None, 7, "", "absent.png", "x" * 5000, "a\x00b", "~nosuchuser", "/dev/zero", "fifo", ".", {"bytes": None, "path": None}, {}, ["x"]]


@pytest.mark.parametrize("cell", CELLS, ids=[str(number) for number in range(len(CELLS))])
def test_a_cell_that_is_no_image(cell: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": cell, "label": "a"}))
    refused(tmp_path / "rows.jsonl", "rows.jsonl line 1", task=IMAGE)


ARCHIVES: list[tuple[str, Callable[[tarfile.TarFile], None]]] = [
    ("nothing", lambda archive: None),
    ("no class", lambda archive: add(archive, "x.png", png())),
    ("an unknown split", lambda archive: add(archive, "other/a/x.png", png())),
    ("no image", lambda archive: add(archive, "train/a/x.txt", b"x")),
    ("a path outside", lambda archive: add(archive, "../a/x.png", png())),
    ("an absolute path", lambda archive: add(archive, "/a/b/x.png", png())),
    ("a link", lambda archive: add(archive, "train/a/x.png", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
    ("a hard link", lambda archive: add(archive, "train/a/x.png", b"", type=tarfile.LNKTYPE, linkname="y")),
    ("a device", lambda archive: add(archive, "train/a/x.png", b"", type=tarfile.CHRTYPE)),
    ("a FIFO", lambda archive: add(archive, "train/a/x.png", b"", type=tarfile.FIFOTYPE)),
    ("a long name", lambda archive: add(archive, "train/a/" + "x" * 5000, png())),
]


@pytest.mark.parametrize("fill", [fill for _, fill in ARCHIVES], ids=[name for name, _ in ARCHIVES])
def test_an_archive_that_cannot_be_right(fill: Callable[[tarfile.TarFile], None], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "rows.tar", "w") as archive:
        fill(archive)
    refused(tmp_path / "rows.tar", "rows.tar", task=IMAGE)


@pytest.mark.parametrize("position", [0, 100, 124, 136, 148, 156, 257, 345, 700])
@pytest.mark.parametrize("byte", [0x00, 0x39, 0xFF, 0x80])
def test_a_damaged_archive_is_read_right_or_refused(position: int, byte: int, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "rows.tar", "w") as archive:
        for index in range(4):
            add(archive, f"train/{index % 2}/{index}.png", png((4, 4 + index)))
    data = bytearray((tmp_path / "rows.tar").read_bytes())
    data[position] = byte
    (tmp_path / "rows.tar").write_bytes(bytes(data))
    try:
        load(tmp_path / "rows.tar", IMAGE)
    except InputError as error:
        one_line(error, "rows.tar")


PLACES = [
    "~nosuchuser/x",
    "/" + "x" * 5000,
    "/x\x00y.csv",
    "/dev/null",
    "/dev/zero",
    "fifo.csv",
    "socket",
    "./absent.csv",
    "",
    "/proc/self/mem",
]


@pytest.mark.parametrize("path", PLACES, ids=[str(number) for number in range(len(PLACES))])
@pytest.mark.parametrize("inside", [False, True], ids=["path", "files"])
def test_places_that_are_no_data(path: str, inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pydantic import ValidationError

    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "fifo.csv")
    (tmp_path / "socket").mkdir()
    with pytest.raises((InputError, ValidationError)) as caught:
        load(tmp_path, files={"train": path, "test": path}) if inside else load(path)
    if isinstance(caught.value, InputError):
        one_line(caught.value)


@pytest.mark.parametrize("inside", [False, True])
def test_a_fifo_among_images_is_never_opened(inside: bool, tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "x.png").write_bytes(png())
    os.mkfifo(tmp_path / "train" / ("a/y.png" if inside else "y"))
    refused(tmp_path, "train", task=IMAGE)


COLUMNS: list[dict[str, Any]] = [
    {"text": "absent"},
    {"text": "x" * 5000},
    {"text": 99},
    {"label": 99},
    {"text_pair": "absent"},
]


@pytest.mark.parametrize("columns", COLUMNS, ids=[str(number) for number in range(len(COLUMNS))])
def test_columns_that_are_not_there(columns: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(GOOD)
    refused(tmp_path / "rows.csv", "no column", columns=columns)


def test_many_unknown_labels_cost_little(tmp_path: Path) -> None:
    lines = [f"row {row},class {row % 1000}" for row in range(3000)]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    (tmp_path / "test.csv").write_text("\n".join(["text,label", *(f"x {row},klass {row}" for row in range(20_000))]) + "\n")
    refused(tmp_path, "label 'klass 0'; allowed by the train split: class 0", "")  # to compare all of them takes half an hour
