"""Tab-separated fields that pandas and csv writers wrote are refused, or read as `quoting` says; ordinary texts with quotes are read."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.reading.load import load_data
from distill.plain_text import PlainText, read_plain
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.quoting import Quotes
from foundation.data.tables import Quoting, Table, column_names, read_table

ORDINARY = [
    '" Hello , " he said .\t1',
    '"A whole sentence in quotes ."\t0',
    'He said " no " .\t1',
    '"\t0',
    '""\t1',
    "five \t0",
    'a 3.5 " disk\t1',
]


def read(path: Path, quoting: Quoting | None = None, header: bool = True) -> list[tuple[Any, ...]]:
    columns: tuple[Any, ...] = ("text", "label") if header else (0, 1)
    return [cells for _, cells in read_table(Table(path, columns, header, quoting=quoting, remedy="set quoting"))]


def seen(text: str) -> int:
    quotes = Quotes()
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        quotes.see(number, line.removesuffix("\r"))
    return quotes.line


@pytest.mark.parametrize("text", ['a "b" c', '"x', "a\tb", "a\nb", '"', '"a"', "\n\n"])
@pytest.mark.parametrize("header", [True, False])
def test_what_pandas_writes_is_refused_and_read_with_the_key(text: str, header: bool, tmp_path: Path) -> None:
    frame = pandas.DataFrame({"text": ["plain", text, "other"], "label": [0, 1, 0]})
    frame.to_csv(tmp_path / "train.tsv", sep="\t", index=False, header=header)
    with pytest.raises(InputError, match=r"train.tsv line \d: .*quotes.*set quoting") as caught:
        read(tmp_path / "train.tsv", header=header)
    assert len(caught.value.lines) == 1
    assert read(tmp_path / "train.tsv", "minimal", header) == [("plain", "0"), (text, "1"), ("other", "0")]
    frame.to_csv(tmp_path / "all.tsv", sep="\t", index=False, header=header, quoting=csv.QUOTE_ALL)
    with pytest.raises(InputError, match="set quoting"):
        read(tmp_path / "all.tsv", header=header)
    assert read(tmp_path / "all.tsv", "minimal", header) == read(tmp_path / "train.tsv", "minimal", header)


@given(
    st.lists(st.text('a" ', max_size=5), min_size=1, max_size=6) | st.lists(st.text('a"\n', max_size=5), min_size=1, max_size=6),
    st.booleans(),
)
def test_a_file_whose_quotes_would_change_a_field_is_found(texts: list[str], label_first: bool) -> None:
    stream = io.StringIO()
    csv.writer(stream, delimiter="\t", lineterminator="\n").writerows([(1, text) if label_first else (text, 1) for text in texts])
    assert bool(seen(stream.getvalue())) == any('"' in text or "\n" in text for text in texts)


@given(st.lists(st.text('a"\t', max_size=5), min_size=1, max_size=6))
def test_so_is_one_with_tabs_in_fields(texts: list[str]) -> None:
    stream = io.StringIO()
    csv.writer(stream, delimiter="\t", lineterminator="\n").writerows([(text, 1) for text in texts])
    assert bool(seen(stream.getvalue())) == any('"' in text or "\t" in text for text in texts)


def test_ordinary_texts_with_quotes_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("text\tlabel\n" + "\n".join(ORDINARY) + "\n")
    assert read(tmp_path / "train.tsv") == [tuple(line.split("\t")) for line in ORDINARY]
    assert read(tmp_path / "train.tsv", "none") == read(tmp_path / "train.tsv")
    for line in ORDINARY:
        assert not seen(f"text\tlabel\n{line}\n")


def test_a_quote_that_closes_rows_later_is_two_texts_where_every_row_is_whole() -> None:
    assert not seen('text\tlabel\n"He said\t1\nnothing\t0\nat all."\t1\n')
    assert seen('text\tlabel\n"He said\nnothing\nat all."\t1\n') == 2


def test_the_key_stands_at_data_or_a_file_and_the_refusal_names_it(tmp_path: Path) -> None:
    for split in ("train", "test"):
        frame = pandas.DataFrame({"text": [f'{split} "{number}"' for number in range(10)], "label": [0, 1] * 5})
        frame.to_csv(tmp_path / f"{split}.tsv", sep="\t", index=False)
    with pytest.raises(InputError, match=r"train.tsv line 2: .*data.quoting: minimal .*data.quoting: none"):
        load_data(DataConfig(path=str(tmp_path)), "text-classification", None, lambda _: None)
    whole = DataConfig.model_validate({"path": str(tmp_path), "quoting": "minimal"})
    assert load_data(whole, "text-classification", None, lambda _: None).evaluation.rows[0] == 'test "0"'
    files: Any = {"train": "train.tsv", "test": {"file": "test.tsv", "quoting": "none"}}
    data = load_data(
        DataConfig.model_validate({"path": str(tmp_path), "quoting": "minimal", "files": files}), "text-classification", None, print
    )
    assert (set(data.train.rows) <= {f'train "{number}"' for number in range(10)}, data.evaluation.rows[0]) == (
        True,
        '"test ""0"""',
    )  # a file says otherwise
    files = {split: {"file": f"{split}.tsv", "quoting": "minimal"} for split in ("train", "test")}
    data = load_data(DataConfig(path=str(tmp_path), files=files), "text-classification", None, lambda _: None)
    assert data.evaluation.rows[0] == 'test "0"'
    files = {split: {"file": f"{split}.tsv", "quoting": "none"} for split in ("train", "test")}
    data = load_data(DataConfig(path=str(tmp_path), files=files), "text-classification", None, lambda _: None)
    assert data.evaluation.rows[0] == '"test ""0"""'
    assert column_names(Table(tmp_path / "train.tsv", (), quoting="minimal")) == ["text", "label"]


def test_plain_text_has_the_key_too(tmp_path: Path) -> None:
    pandas.DataFrame({"text": ['a "b"', "c"]}).to_csv(tmp_path / "more.tsv", sep="\t", index=False)
    with pytest.raises(InputError, match="quoting: minimal"):
        read_plain(PlainText(path=str(tmp_path / "more.tsv")), "stages.distill.extra_text")
    assert read_plain(PlainText(path=str(tmp_path / "more.tsv"), quoting="minimal"), "stages.distill.extra_text") == ['a "b"', "c"]


def test_other_formats_have_no_such_key(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,1\n")
    with pytest.raises(InputError, match="quoting: none given; it is for tsv files"):
        read(tmp_path / "train.csv", "none")
