"""Chooses the irrelevant documents of the lists that a reranker learns from, next to each relevant document.

They are chosen so that nothing but reading both texts shows what is right:

    near    A relevant document that the first search found is next to wrong ones that it found, evenly spread over the candidates; one
            that it missed next to others that it missed. If all wrong documents are near, a model learns that what is near is wrong.
    known   Wrong documents are relevant to other queries, as far as there are such. A model learns documents by heart that are never right:
            on Cranfield the order by how often a document was right in train has an NDCG@10 of 0.10 on the queries of dev, where the
            candidates as they were found have 0.39.

The n-th list of a query takes evenly spread documents, moved on by n places, so that its lists share as few as they can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from foundation.core.spread import spread

T = TypeVar("T")


class WrongCandidates:
    """Chooses the irrelevant documents next to relevant ones.

    Args:
        known: Ids of the documents that are relevant to a query of train.
        most: Irrelevant documents for each relevant one.
    """

    def __init__(self, known: Iterable[str], most: int) -> None:
        self.known = list(dict.fromkeys(known))
        self.places = {document: place for place, document in enumerate(self.known)}
        self.most, self.missed = most, 0

    def lists(self, grades: Mapping[str, int], candidates: Sequence[str]) -> list[list[str]]:
        """Returns a list for each relevant document of a query: the document and its irrelevant ones.

        Args:
            grades: Grades of the documents that were judged for the query; above 0: relevant.
            candidates: The candidates of the query, the best first.
        """
        near, right = set(candidates), [document for document, grade in grades.items() if grade > 0]
        wrong = [document for document in candidates if not grades.get(document)]
        first, second = ([document for document in wrong if (document in self.places) == known] for known in (True, False))
        made = []
        for number, document in enumerate(right):
            beside = [] if document in near else self._missed(near.union(right))
            if not beside:
                beside = turned(first, number, self.most)
                beside += turned(second, number, self.most - len(beside))
            made.append([document, *beside])
        return made

    def _missed(self, left_out: set[str]) -> list[str]:
        """Returns documents that are relevant to other queries, and none of those left out; fewer where there are too few."""
        taken, chosen = set(left_out), []
        for place in turned(range(len(self.known)), self.missed, self.most):
            others = (self.known[(place + step) % len(self.known)] for step in range(len(self.known)))
            other = next((one for one in others if one not in taken), None)
            if other is not None:
                taken.add(other)
                chosen.append(other)
        self.missed += 1
        return chosen


def turned(items: Sequence[T], number: int, count: int) -> list[T]:
    """Returns `count` evenly spread items, or all if there are no more, each of them moved on by `number` places."""
    return [items[(place + number) % len(items)] for place in spread(range(len(items)), count)]
