"""Completes a page: every figure gets its explanation, and every cell of a table the name of its column.

Templates write plain tables. This pass reads the finished HTML and adds what every cell would have to repeat:

    th, dt, dfn   whose text has an entry in the glossary become a button that shows the explanation (a popover: no script; by mouse,
                  keyboard and touch)
    td            the name of its column, which a narrow screen shows: a row of a table is a card there; a cell that several rows share is
                  repeated in their cards
    td, dd        the entry of its figure, so that the explanation shows where the mouse rests
    page          the explanations themselves, each once

An entry is found by the text of the label, or named: `data-term="KEY"`; an empty key means none. A column whose name says too little
without its neighbours has another one in cards: `data-column="NAME"`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape, unescape
from html.parser import HTMLParser

from compress.report.glossary import TERMS, Term, term_of

LABELS, CELLS = ("dt", "dfn"), ("th", "td")
VOID = frozenset({"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"})
LETTERS = re.compile(r"[^\W\d_]")


def labelled(page: str) -> str:
    """Returns the page, completed.

    Args:
        page: One HTML document that closes its elements in order, with a style element.

    Raises:
        KeyError: A `data-term` or a `dfn` has no entry in the glossary.
    """
    reader = _Reader()
    reader.feed(page)
    reader.close()
    used = [TERMS[key] for key in TERMS if key in reader.used]
    whole = "".join(reader.pieces)
    return whole.replace("</style>", _rules(used) + "</style>", 1).replace("</body>", _meanings(used) + "</body>", 1) if used else whole


def _rules(used: Sequence[Term]) -> str:
    """Returns the style rules that show an explanation while the mouse rests on its figure, or its label has the focus."""
    soon = "".join(
        f"body:has([popovertarget=term-{term.key}]:is(:hover,:focus-visible)) #term-{term.key}{{visibility:visible}}\n" for term in used
    )
    later = "".join(
        f"body:has([data-term={term.key}]:hover) #term-{term.key}{{visibility:visible;transition:visibility 0s .6s}}\n" for term in used
    )
    return f"@media screen{{\n@media (hover:hover){{\n{later}}}\n{soon}}}\n"


def _meanings(used: Sequence[Term]) -> str:
    return "".join(
        f'<aside class="meaning" id="term-{term.key}" popover><b>{escape(term.name)}</b> {escape(term.meaning)}</aside>\n' for term in used
    )


@dataclass
class _Column:
    label: str
    """As HTML, without elements."""
    term: Term | None


@dataclass
class _Table:
    columns: list[_Column] = field(default_factory=list)
    in_head: bool = False
    place: int = 0
    """Column of the next cell of the row."""
    shared: dict[int, tuple[int, str]] = field(default_factory=dict)
    """For each column, the cell that spans rows and how many further rows it spans."""


@dataclass
class _Element:
    """An element whose contents are read before it is written."""

    tag: str
    start: str
    attributes: dict[str, str]
    pieces: list[str] = field(default_factory=list)
    depth: int = 0
    label: str = ""
    """Its own text as HTML, without the text of nested elements."""


class _Reader(HTMLParser):
    """Copies a page, and completes it."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.written: list[str] = []
        self.used: set[str] = set()
        self._tables: list[_Table] = []
        self._open: list[_Element] = []
        self._meant: Term | None = None
        """The entry of the last dt."""

    @property
    def pieces(self) -> list[str]:
        """Where the next piece of the page goes."""
        return self._open[-1].pieces if self._open else self.written

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens an element."""
        text, attributes = self.get_starttag_text() or "", {name: value or "" for name, value in attrs}
        if self._open and tag not in VOID:
            self._open[-1].depth += 1
        if tag in LABELS or (tag in CELLS and self._tables):
            self._open.append(_Element(tag, text, attributes))
            return
        if tag == "dd" and self._meant is not None:
            text = _with(text, self._meant)
        self.pieces.append(text)
        if tag == "table":
            self._tables.append(_Table())
        elif tag in ("thead", "tr") and self._tables:
            self._tables[-1].in_head |= tag == "thead"
            self._tables[-1].place = 0

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Copies an element of SVG that closes itself."""
        self.pieces.append(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        """Closes an element."""
        if self._open and self._open[-1].depth == 0 and tag == self._open[-1].tag:
            element = self._open.pop()
            self.pieces.append(self._label(element) if tag in LABELS else self._cell(element))
            if self._open:
                self._open[-1].depth -= 1
                self._open[-1].label += element.label
            return
        if self._open:
            self._open[-1].depth -= 1
        if tag == "tr" and self._tables:
            self.pieces.append(self._repeated(self._tables[-1]))
        self.pieces.append(f"</{tag}>")
        if tag == "thead" and self._tables:
            self._tables[-1].in_head = False
        elif tag == "table":
            self._tables.pop()

    def handle_data(self, data: str) -> None:
        """Copies text."""
        self.pieces.append(data)
        if self._open and self._open[-1].depth == 0:
            self._open[-1].label += data

    def handle_entityref(self, name: str) -> None:
        """Copies a named character."""
        self.handle_data(f"&{name};")

    def handle_charref(self, name: str) -> None:
        """Copies a numbered character."""
        self.handle_data(f"&#{name};")

    def handle_comment(self, data: str) -> None:
        """Copies a comment."""
        self.pieces.append(f"<!--{data}-->")

    def handle_decl(self, decl: str) -> None:
        """Copies the document type."""
        self.pieces.append(f"<!{decl}>")

    def _term(self, element: _Element) -> Term | None:
        """Returns the entry of a label, which is then used."""
        named = element.attributes.get("data-term")
        if named == "":
            return None
        found = TERMS[named] if named is not None else term_of(unescape(element.attributes.get("data-column", element.label)))
        if found is None and element.tag == "dfn":
            raise KeyError(f"no entry of the glossary for {unescape(element.label)!r}")
        if found is not None:
            self.used.add(found.key)
        return found

    def _label(self, element: _Element) -> str:
        """Returns a dt or a dfn, with its explanation."""
        term = self._term(element)
        if element.tag == "dfn":
            assert term is not None, "a dfn has an entry"
            return _button(element.label, term)
        self._meant = term
        return f"{element.start}{_explained(element, term)}</dt>"

    def _cell(self, element: _Element) -> str:
        """Returns a cell: of the head with its explanation, of the body with the name of its column."""
        table = self._tables[-1]
        width, height = (int(spanned) if (spanned := element.attributes.get(name)) else 1 for name in ("colspan", "rowspan"))
        if table.in_head:
            term = self._term(element)
            alone = element.attributes.get("data-column")
            table.columns += [_Column(element.label.strip() if alone is None else escape(alone), term)] * width
            return f"{element.start}{_explained(element, term)}</{element.tag}>"
        passed = self._repeated(table)
        place, table.place = table.place, table.place + width
        column = table.columns[place] if place < len(table.columns) and width == 1 else _Column("", None)
        contents = "".join(element.pieces)
        speaks = element.tag == "td" or not LETTERS.search(unescape(element.label))
        start = element.start if column.term is None or element.tag == "th" else _with(element.start, column.term)
        name = _name(column) if speaks and column.label and contents.strip() else ""
        if height > 1:
            again = re.sub(r'\s(?:rowspan="\d+"|scope="\w+")', "", f"{start[:-1]} data-again>")
            table.shared[place] = (height - 1, f"{again}{name}{contents}</{element.tag}>")
        return f"{passed}{start}{name}{contents}</{element.tag}>"

    def _repeated(self, table: _Table) -> str:
        """Returns the cells of rows above that span the next columns too; only cards show them."""
        found = ""
        while table.place in table.shared:
            left, cell = table.shared.pop(table.place)
            if left > 1:
                table.shared[table.place] = (left - 1, cell)
            found += cell
            table.place += 1
        return found


def _with(start: str, term: Term) -> str:
    """Returns the start of an element that names its entry."""
    return start if "data-term=" in start else f'{start[:-1]} data-term="{term.key}">'


def _button(label: str, term: Term, more: str = "") -> str:
    return f'<button type="button" class="term{more}" popovertarget="term-{term.key}">{label}</button>'


def _name(column: _Column) -> str:
    return f'<span class="column">{column.label}</span>' if column.term is None else _button(column.label, column.term, " column")


def _explained(element: _Element, term: Term | None) -> str:
    """Returns the contents of a label, with its own text as a button."""
    contents = "".join(element.pieces)
    own = element.label.strip()
    return contents if term is None or not own else contents.replace(own, _button(own, term), 1)
