"""Every figure of a page is explained, every cell of a table names its column, and nothing else of a page changes."""

import re
from collections.abc import Callable
from html import escape
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.report.glossary import GROUPS, TERMS, term_of
from compress.report.labelled import labelled
from tests.compress.report.sections.test_cascade import made as cascade
from tests.compress.report.test_generation_section import report as report_of_answers
from tests.compress.report.test_generation_section import speed
from tests.compress.report.test_page import make_report
from tests.html_tree import Node, tree
from tests.plain_reports import render

pytestmark = pytest.mark.whole

START, END = "<!DOCTYPE html><html><head><style>b>i{}</style></head><body>", "</body></html>"


def with_rows() -> dict[str, Any]:
    """Returns a report with everything that it says of rows, classes and memory."""
    report = make_report()
    figures = {"precision": 0.5, "recall": None, "f1": 0.25}
    rows = [{"name": f"class {number}", "n": 3, "baseline": figures, "served": figures} for number in range(30)]
    report["classes"] = {"backend": "triton", "majority": {"name": "class 1", "share": 0.1}, "rows": rows}
    report["data"] = [{"split": "train", "rows": 30, "longest": 9, "truncated": 3}, {"split": "evaluation", "rows": 3}]
    report["evaluation_rows"] = {"left_out_of_train": 4, "in_train": 2}
    report["flipped_rows"] = [
        {"row": 1, "variant": "quantize", "from": "torch", "to": "openvino", "before": "a", "after": "b", "input": "t"}
    ]
    report["variants"][1]["latency"][0]["peak_memory_bytes"] = 123_000_000
    report["triton"]["models"][0]["peak_memory_bytes"] = 456_000_000
    return report


PAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "classes": make_report,
    "rows": with_rows,
    "answers": lambda: report_of_answers(speed(1, 100.0), speed(8, 500.0)),
    "cascade": lambda: {**make_report(), "cascade": cascade()},
}


def body(contents: str) -> Node:
    return next(tree(labelled(START + contents + END)).all("body"))


def added(node: Node) -> bool:
    return "column" in node.classes or "meaning" in node.classes or "data-again" in node.attributes


def written(node: Node) -> str:
    """Returns the text of a page without what was added to it."""
    pieces = (part if isinstance(part, str) else "" if added(part) or part.tag == "style" else written(part) for part in node.parts)
    return "".join(pieces)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=12)


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), TEXT)
def test_nothing_of_a_page_is_lost(rows: list[tuple[str, str]], name: str) -> None:
    cells = "".join(f'<tr><th scope="row">{escape(a)}</th><td><b>{escape(b)}</b>{escape(a)}</td></tr>' for a, b in rows)
    head = f"<thead><tr><th>{escape(name)}</th><th>p50 ms</th></tr></thead>"
    page = f"{START}<table>{head}<tbody>{cells}</tbody></table><p>&nbsp;&#10003;</p>{END}"
    assert written(tree(labelled(page))).split() == written(tree(page)).split()


def test_a_page_without_figures_stays_as_it_is() -> None:
    page = f'{START}<!-- c --><svg viewBox="0 0 1 1"><path d="M0"/></svg><dl><dt>a &amp; b</dt><dd>1&nbsp;x</dd></dl>{END}'
    assert labelled(page) == page


def test_a_cell_names_its_column_and_a_shared_one_stands_in_every_card() -> None:
    head = "<thead><tr><th>Concurrency</th><th colspan='2'>Other</th><th data-column='Whole name'>name</th></tr></thead>"
    rows = "<tr><th scope='row'>4</th><td>1</td><td rowspan='2'>both</td><td></td></tr><tr><th>b</th><td>2</td><td>3</td></tr>"
    _, *cards = body(f"<table>{head}<tbody>{rows}</tbody></table>").all("tr")
    named = [[(next((n.text for n in cell.children if "column" in n.classes), ""), cell.text) for cell in card.children] for card in cards]
    assert named[0] == [("Concurrency", "Concurrency 4"), ("Other", "Other 1"), ("Other", "Other both"), ("", "")]
    assert named[1] == [("", "b"), ("Other", "Other 2"), ("Other", "Other both"), ("Whole name", "Whole name 3")]
    assert ["data-again" in cell.attributes for cell in cards[1].children] == [False, False, True, False]


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_is_explained(name: str) -> None:
    page = tree(render(PAGES[name]()))
    meanings = {node.attributes["id"]: node for node in page.all("aside", klass="meaning")}
    labels = [
        *(th for th in page.all("th") if "number" in th.classes),
        *(dt for box in page.all("dl", klass="figures") for dt in box.all("dt")),
    ]
    assert len(labels) > 20
    for label in labels:
        buttons = [*label.all("button", klass="term")]
        assert buttons, f"no explanation of {label.text}"
        assert all(button.attributes["popovertarget"] in meanings for button in buttons)
    assert all("popover" in node.attributes and len(node.text) > 20 for node in meanings.values())
    told = {node.attributes["data-term"] for node in page.all() if node.attributes.get("data-term")}
    assert told <= {key.removeprefix("term-") for key in meanings}


@pytest.mark.parametrize("name", PAGES)
def test_explanations_show_by_mouse_keyboard_and_touch(name: str) -> None:
    page = render(PAGES[name]())
    style = next(tree(page).all("style")).text
    for key in re.findall(r'<aside class="meaning" id="term-(\w+)"', page):
        assert f"[popovertarget=term-{key}]:is(:hover,:focus-visible)" in style
    assert "<script" not in page


@pytest.mark.parametrize("name", PAGES)
def test_every_cell_of_the_body_names_its_column(name: str) -> None:
    for table in tree(render(PAGES[name]())).all("table"):
        heads = [th.text for head in table.all("thead") for th in head.all("th")]
        for cell in (cell for rows in table.all("tbody") for cell in rows.all("td")):
            if cell.text and "colspan" not in cell.attributes:
                assert any("column" in node.classes and node.text for node in cell.children), (heads, cell.text)


def test_what_a_report_says_of_rows_classes_and_memory_is_on_the_page() -> None:
    page = tree(render(with_rows()))
    (data,) = page.all("section", id="data")
    for words in ("3 (10.0\u00a0%)", "2 evaluation rows are trained on", "4 train rows"):
        assert words.replace("\u00a0", " ") in data.text.replace("\u00a0", " ")
    text = page.text.replace("\u00a0", " ")
    assert "123 MB" in text
    assert "456 MB" in text
    assert "class 29" in text
    assert [node.text.replace("\u00a0", " ") for node in page.all("b") if node.text.startswith("10.00")] == ["10.00 %"]
    assert any(button.text == "majority baseline" for button in page.all("button", klass="term"))
    older = tree(render(make_report()))
    assert not list(older.all("section", id="data"))
    assert "By class" not in older.text


def test_keys_are_unique_and_labels_mean_one_thing() -> None:
    terms = [term for group in GROUPS.values() for term in group]
    assert len(TERMS) == len(terms)
    labels = [label.casefold() for term in terms for label in {term.name.casefold(), *map(str.casefold, term.labels)}]
    assert sorted(labels) == sorted(set(labels))
    assert all(term.meaning.endswith(".") and not re.search(r"[<>`]", term.meaning) for term in terms)


def test_labels_that_vary_are_found() -> None:
    found = {label: term_of(label) for label in ("Accuracy change", "recall@5", "Heads kept", "P50\u00a0ms", "OpenVINO")}
    assert {label: term and term.key for label, term in found.items()} == {
        "Accuracy change": "change",
        "recall@5": "recall_at",
        "Heads kept": "kept_units",
        "P50\u00a0ms": "p50",
        "OpenVINO": "backend",
    }
    assert [term_of(label) for label in ("a name of a user", "rows")] == [None, None], "settings have names of their own"


def test_a_definition_without_an_entry_is_refused() -> None:
    with pytest.raises(KeyError, match="no such thing"):
        labelled(f"{START}<dfn>no such thing</dfn>{END}")
