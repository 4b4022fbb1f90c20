"""An engine of two graphs: one for images and one for texts (`foundation.models.heads.towers`), each opened as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from export.engines.spec import Engine, EngineSpec, Logits, Placement, Probed
from foundation.core.arrays import Array, Features

PIXELS = "pixel_values"


def tower_of(features: Features) -> str:
    """Returns the tower that reads a batch."""
    return "image" if PIXELS in features else "text"


class Towers:
    """Both engines, in one process.

    Args:
        spec: One spec for both; `towers` has the file of each.
        open_one: Opens an engine.
    """

    def __init__(self, spec: EngineSpec, open_one: Callable[[EngineSpec], Engine]) -> None:
        self._towers: Mapping[str, Engine] = {name: open_one(replace(spec, path=path, towers={})) for name, path in spec.towers.items()}
        self._ran: set[str] = set()

    def predict(self, features: Features) -> Logits:
        """Returns the vectors of one batch, all images or all texts, float32 [n, D]."""
        self._ran.add(tower_of(features))
        return self._towers[tower_of(features)].predict(features)

    def precisions(self, gemms: Sequence[str], batch: int, sequence: int | None) -> dict[str, str]:
        """Returns the precision of each GEMM node of the tower that has such rows: texts have a length, images none."""
        return self._towers["image" if sequence is None else "text"].precisions(gemms, batch, sequence)

    def placement(self) -> Placement:
        """Returns the placement of the towers that have predicted; both are opened with the same settings."""
        found = [engine.placement() for name, engine in self._towers.items() if name in self._ran]
        assert all(placement == found[0] for placement in found), found
        return found[0]

    def probe(self, tensors: Sequence[str], features: Features) -> dict[str, Array]:
        """Returns tensors inside the graph that reads these rows."""
        engine = self._towers[tower_of(features)]
        assert isinstance(engine, Probed), engine
        return engine.probe(tensors, features)
