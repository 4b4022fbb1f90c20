"""A page as a tree, for tests that ask about its structure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "input", "br", "link", "img", "hr"}


@dataclass
class Node:
    """An element."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    parts: list[Node | str] = field(default_factory=list)

    @property
    def children(self) -> list[Node]:
        return [part for part in self.parts if isinstance(part, Node)]

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    @property
    def text(self) -> str:
        return " ".join("".join(part if isinstance(part, str) else f" {part.text} " for part in self.parts).split())

    def all(self, tag: str | None = None, **attributes: str) -> Iterator[Node]:
        """Yields the elements below this one, in order; `klass` and `data_term` stand for class and data-term."""
        wanted = {name.replace("klass", "class").replace("_", "-"): value for name, value in attributes.items()}
        for child in self.children:
            if (tag is None or child.tag == tag) and all(
                value in child.classes if name == "class" else child.attributes.get(name) == value for name, value in wanted.items()
            ):
                yield child
            yield from child.all(tag, **attributes)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Node("")
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].parts.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].parts.append(Node(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, tag

    def handle_data(self, data: str) -> None:
        self.open[-1].parts.append(data)


def tree(page: str) -> Node:
    """Returns the root of a page."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert len(reader.open) == 1
    return reader.root
