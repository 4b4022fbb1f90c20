"""Rows without labels: python -m pytest tests/compress/reading/test_unlabelled.py"""

import gzip
import json
from io import BytesIO

import pytest
from PIL import Image

from compress.reading.unlabelled import read_unlabelled
from foundation.core.errors import InputError

TEXTS = ["a fine film", "with\ta tab", "", "n\u00e4h"]


def png() -> bytes:
    file = BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_every_line_of_a_text_file_is_a_row(tmp_path, end):
    content = end.join([*TEXTS, ""]).encode()
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.TXT.gz").write_bytes(gzip.compress(content))
    for name in ("a.txt", "b.TXT.gz"):
        assert read_unlabelled(tmp_path / name, "text", ["text"], "--column") == TEXTS


def test_tables_by_their_columns(tmp_path):
    rows = [{"text": "a", "other": "b", "label": 1}, {"text": "c", "other": "d", "label": 0}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.csv").write_text('text,other\na,b\n"c",d\n')
    (tmp_path / "a.tsv").write_text("text\tother\na\tb\nc\td\n")
    for name in ("a.jsonl", "a.csv", "a.tsv"):
        assert read_unlabelled(tmp_path / name, "text", ["text"], "--column") == ["a", "c"]
        assert read_unlabelled(tmp_path / name, "text", ["other", "text"], "--column") == [("b", "a"), ("d", "c")]
        with pytest.raises(InputError, match=r"no column 'txt'; .*'text', 'other'.*'text'\?; set --column$"):
            read_unlabelled(tmp_path / name, "text", ["txt"], "--column")


def test_images_of_folders_and_tables(tmp_path):
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "one.png").write_bytes(png())
    (tmp_path / "a.csv").write_text("image\nimages/cat/one.png\n")
    assert read_unlabelled(tmp_path / "images", "image", ["image"], "--column") == [png()]
    assert read_unlabelled(tmp_path / "a.csv", "image", ["image"], "--column") == [png()]


@pytest.mark.parametrize(
    ("name", "content", "modality", "columns", "words"),
    [
        (
            "a.txt",
            b"x",
            "text",
            ["text", "text_pair"],
            "holds one text a line; give text and text_pair as columns of a tsv, csv or jsonl file",
        ),
        ("a.txt", b"x", "image", ["image"], "holds one text a line; give image as columns"),
        ("a.txt", b"", "text", ["text"], "empty file"),
        ("a.txt", b"\xff", "text", ["text"], "line 1: byte 0xff at position 1 is not UTF-8"),
        ("a.csv", b"text\n", "text", ["text"], "no rows; at least one is needed"),
        ("a.jsonl", b'{"text": 3}', "text", ["text"], "a.jsonl line 1: 3 given as text"),
        ("a.jsonl", b'{"image": "absent.png"}', "image", ["image"], "absent.png' cannot be read"),
        ("a.doc", b"x", "text", ["text"], r"file type '\.doc'; allowed: "),
    ],
)
def test_files_that_are_refused(tmp_path, name, content, modality, columns, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        read_unlabelled(tmp_path / name, modality, columns, "--column")
    assert len(caught.value.lines) == 1
