"""Several adapters behind one server: what mixing them costs, and what adapters cost beside the model without them.

    compress run RECIPE --out RUN            with a stage `adapters`, `export: {variants: all}` and a repository
    python benchmarks/server/adapters.py RUN [--turns 5] [--seconds 5] [--only ...] [--out FILE]

The texts are the evaluation rows of the run, the same for each load; only names differ. Requests of one row, 64 under way, and of as many
rows as the server batches, 4 under way; the loads take turns, and ratios are those within a turn. The generator shares the server's cores.

    mixed    rows that name two adapters in turn, over rows that name the first of them: rows per second
    without  rows that name one adapter, over the model that the adapters stand on, as the run serves it: rows per second
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

from foundation.standalone.adapted import plain, with_adapter
from foundation.standalone.preprocess import Preprocessor
from parts.served_model import ServedModel, arguments, carry_out, head_of, in_turns, median, ratio
from triton_repo.config import model_names
from triton_repo.load.settings import Load

SMALL, LARGE = 64, 4
"""Requests under way at saturation: of one row, and of many."""


class Bench:
    """What the scenarios share.

    Args:
        model: The served model with adapters.
        options: The command line.
    """

    def __init__(self, model: ServedModel, options: argparse.Namespace) -> None:
        self.model, self.turns, self.seconds = model, options.turns, options.seconds
        self.names = Preprocessor.load(model.folder / "1").adapters
        self.texts = [plain(row) for row in model.rows]

    def naming(self, *names: str) -> ServedModel:
        """Returns the model with rows that name these adapters in turn; without names, plain rows."""
        rows = [with_adapter(text, name) for text, name in zip(self.texts, cycle(names), strict=False)] if names else self.texts
        return replace(self.model, rows=rows)


def saturated(bench: Bench, arms: dict[str, tuple[ServedModel, str]]) -> dict[str, Any]:
    """Measures loads in turns, for each size of a request.

    Args:
        bench: What scenarios share.
        arms: By name the rows, and the address of gRPC that they are sent to.

    Returns:
        For each size the median rows per second of each arm, the ratio of the first to the second, and all turns.
    """
    found = {}
    for rows, under_way in ((1, SMALL), (int(bench.model.config.max_batch_size), LARGE)):
        load = Load(concurrency=under_way, rows=rows, seconds=bench.seconds)
        loads: dict[str, Callable[[], dict[str, Any]]] = {name: partial(one.send, at, load) for name, (one, at) in arms.items()}
        turns = in_turns(loads, bench.turns)
        first, second = arms
        found[f"{rows} rows a request"] = {
            "rows_per_s": {name: median(one, "rows_per_s") for name, one in turns.items()},
            f"{first} over {second}": ratio(turns[first], turns[second]),
            "errors": sum(kind["n"] for some in turns.values() for one in some for kind in one["errors"].values()),
            "turns": turns,
        }
    return found


def mixed(bench: Bench) -> dict[str, Any]:
    """See above."""
    one, other = bench.names[:2]
    with bench.model.serving() as serving:
        at = serving.service.grpc_address
        return saturated(bench, {f"{one} and {other}": (bench.naming(one, other), at), one: (bench.naming(one), at)})


def without(bench: Bench) -> dict[str, Any]:
    """See above."""
    folder = bench.model.folder.parent
    below = next((name for name in model_names(folder) if name.endswith("-int8") and not _adapters(folder, name)), None)
    assert below is not None, "the repository has no int8 model without adapters: give `export: {variants: all}` in the recipe"
    plainly = replace(bench.naming(), folder=folder / below)
    with bench.model.serving() as serving, plainly.serving() as other:
        arms = {bench.names[0]: (bench.naming(bench.names[0]), serving.service.grpc_address), below: (plainly, other.service.grpc_address)}
        return saturated(bench, arms)


def _adapters(folder: Any, name: str) -> Sequence[str]:
    return Preprocessor.load(folder / name / "1").adapters


def main() -> None:
    """Runs the scenarios."""
    parser = arguments(__doc__, [mixed, without], seconds=5.0)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    model = ServedModel.of(options.run, options.model)
    bench = Bench(model, options)
    carry_out(options, {**head_of(model), "adapters": list(bench.names)}, [mixed, without], bench)


if __name__ == "__main__":
    main()
