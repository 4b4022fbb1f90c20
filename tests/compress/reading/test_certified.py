from pathlib import Path

import numpy as np
import pytest

from compress.reading.certified import with_certify
from foundation.data.config import DataConfig
from foundation.data.splits import CertifyRows, Data, Split
from foundation.labels.classes import ClassIds
from foundation.labels.label_sets import LabelSets
from tests.problems import raises_problem

TASK = "text-classification"


def split(*texts: str) -> Split:
    return Split(list(texts), ClassIds(np.zeros(len(texts), np.int64)))


def data() -> Data:
    return Data(split("a film", "a bad film"), split("a good one"), split("the end "), ("bad", "good"))


def read(folder: Path, text: str, name: str = "new.tsv", task: str = TASK, known: Data | None = None, **keys: object) -> CertifyRows:
    (folder / name).write_text(text, encoding="utf-8")
    entry = {key: keys.pop(key) for key in ("header", "columns") if key in keys}
    config = DataConfig(path=str(folder), certify={"files": [{"file": name, **entry}], **keys})  # type: ignore[arg-type]
    said: list[str] = []
    found = with_certify(known or data(), config, task, said.append, numbered=True).certify
    assert found is not None
    assert len(said) == 1
    assert str(len(found)) in said[0]
    return found


def test_without_the_key_nothing_is_read(tmp_path: Path) -> None:
    known = data()
    assert with_certify(known, DataConfig(path=str(tmp_path)), TASK, print, numbered=True) is known


def test_rows_need_no_labels(tmp_path: Path) -> None:
    found = read(tmp_path, "text\nfirst row\nsecond row\n")
    assert found.rows == ["first row", "second row"]
    assert found.labels is None
    assert found.shared == 0


def test_labels_are_read_where_their_column_is_named(tmp_path: Path) -> None:
    found = read(tmp_path, "first row\tgood\nsecond row\tbad\n", header=False, columns={"text": 0, "label": 1})
    assert found.labels is not None
    assert found.labels.array.tolist() == [1, 0]
    numbers = read(tmp_path, "text\tlabel\nfirst row\t0\nsecond row\t1\n", columns={"label": "label"})
    assert numbers.labels is not None
    assert numbers.labels.array.tolist() == [0, 1]
    with raises_problem("new.tsv line 2", "great", "bad"):
        read(tmp_path, "text\tlabel\nfirst row\tgreat\n", columns={"label": "label"})


def test_pairs_and_sets_are_read(tmp_path: Path) -> None:
    pairs = read(tmp_path, '{"text": "one", "text_pair": "two"}\n', "new.jsonl", columns={"text_pair": "text_pair"})
    assert pairs.rows == [("one", "two")]
    known = Data(
        *(Split([text], LabelSets(np.zeros((1, 2), bool))) for text in ("a", "b", "c")),
        labels=("bad", "good"),
    )
    sets = read(
        tmp_path,
        '{"text": "one", "label": ["good", "bad"]}\n{"text": "two", "label": []}\n',
        "new.jsonl",
        "multi-label-classification",
        known,
        columns={"label": "label"},
    )
    assert sets.labels is not None
    assert sets.labels.array.tolist() == [[True, True], [False, False]]


def test_of_sentences_with_tags_the_words_are_read(tmp_path: Path) -> None:
    task = "token-classification"
    found = read(tmp_path, "-DOCSTART- O\n\nJohn B-NEW\nlives O\n\n\na\tO\nfilm O\n\nin O\nYork X\n", "new.conll", task, shared="drop")
    assert (found.rows, found.labels, found.shared) == (["John lives", "in York"], None, 1)
    table = '{"words": ["in", "New York", ""]}\n{"words": []}\n{"words": ["one"]}\n'
    assert read(tmp_path, table, "new.jsonl", task, columns={"tokens": "words"}).rows == ["in New York", "one"]
    for wrong in ('"in York"', "3"):
        with raises_problem("new.jsonl line 1", "lists of the same length"):
            read(tmp_path, f'{{"words": {wrong}}}\n', "new.jsonl", task, columns={"tokens": "words"})


def test_where_answers_are_numbers_labels_are_not_read(tmp_path: Path) -> None:
    pairs = "a\tb\tscore\none\ttwo\t3.5\n"
    found = read(tmp_path, pairs, task="text-regression", columns={"text": "a", "text_pair": "b", "label": "score"})
    assert (found.rows, found.labels) == ([("one", "two")], None)


def test_where_answers_are_vectors_each_text_is_a_row(tmp_path: Path) -> None:
    task, pairs = "sentence-embedding", "a\tb\tscore\none\ttwo\t3.5\nthree\tfour\t1\n"
    of_pairs = read(tmp_path, pairs, task=task, columns={"text": "a", "text_pair": "b"})
    assert (of_pairs.rows, of_pairs.labels) == (["one", "two", "three", "four"], None)
    one = read(tmp_path, pairs, task=task, columns={"text": "b"})
    assert one.rows == ["two", "four"]
    config = DataConfig(path=str(tmp_path), certify={"files": "new.tsv"}, columns={"text": "b", "text_pair": "a", "label": "score"})  # type: ignore[arg-type]
    found = with_certify(data(), config, task, lambda line: None, numbered=False).certify
    assert found is not None
    assert found.rows == ["two", "one", "four", "three"]


@pytest.mark.parametrize("leak", ["a bad film", "a good one", "the end", "the  end"])
def test_a_row_of_any_split_is_refused_or_left_out(tmp_path: Path, leak: str) -> None:
    text = f"text\nfirst row\n{leak}\nsecond row\n"
    with raises_problem("data.certify.files", "1 of 3 rows", leak, "drop"):
        read(tmp_path, text)
    found = read(tmp_path, text, shared="drop")
    assert found.rows == ["first row", "second row"]
    assert found.shared == 1


def test_labels_of_left_out_rows_are_left_out_too(tmp_path: Path) -> None:
    found = read(tmp_path, "text\tlabel\na film\tgood\nnew\tbad\nother\tgood\n", columns={"label": "label"}, shared="drop")
    assert found.labels is not None
    assert found.labels.array.tolist() == [0, 1]


def test_true_evaluation_rows_are_known_where_selection_rows_stand_for_them(tmp_path: Path) -> None:
    with raises_problem("data.certify.files", "1 of 1 rows"):
        read(tmp_path, "text\nthe end\n", known=data().judged_on("selection"))


def test_rows_of_a_certificate_change_no_digest_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "new.tsv").write_text("text\nfirst row\n", encoding="utf-8")
    config = DataConfig(path=str(tmp_path), certify={"files": "new.tsv"})  # type: ignore[arg-type]
    found = with_certify(data(), config, TASK, lambda line: None, numbered=True)
    assert found.digest == data().digest
    assert found.certify is not None
    other = CertifyRows(["first row"], ClassIds(np.zeros(1, np.int64)))
    assert len({found.certify.digest, other.digest, CertifyRows(["other row"]).digest}) == 3


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    with raises_problem("data.certify.files", "new.tvs", "new.tsv"):
        config = DataConfig(path=str(tmp_path), certify={"files": "new.tvs"})  # type: ignore[arg-type]
        (tmp_path / "new.tsv").write_text("text\nrow\n", encoding="utf-8")
        with_certify(data(), config, TASK, print, numbered=True)
    with raises_problem("new.tsv", "no rows"):
        read(tmp_path, "text\n")
    with raises_problem("data.certify.files", "all 1 rows"):
        read(tmp_path, "text\na film\n", shared="drop")
    with raises_problem("data.certify", "reranking", TASK):
        read(tmp_path, "text\nrow\n", task="reranking")


def test_images_of_a_folder_are_read_with_their_classes(tmp_path: Path) -> None:
    from compress.reading import images

    files = list(images.digits())[:3]
    for number, file in enumerate(files):
        (tmp_path / "new" / file.label).mkdir(parents=True, exist_ok=True)
        (tmp_path / "new" / file.label / f"{number}.png").write_bytes(file.data)
    config = DataConfig(path=str(tmp_path), certify={"files": "new"})  # type: ignore[arg-type]
    names = tuple(str(number) for number in range(10))
    known = Data(*(split(text) for text in ("a", "b", "c")), labels=names)
    found = with_certify(known, config, "image-classification", lambda line: None, numbered=False).certify
    assert found is not None
    assert found.labels is not None
    assert sorted(found.rows, key=repr) == sorted((file.data for file in files), key=repr)
    assert sorted(found.labels.array.tolist()) == sorted(int(file.label) for file in files)
