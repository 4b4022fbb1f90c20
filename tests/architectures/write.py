"""Runs every step on every architecture of the table and writes the results, which `docs/generate.py` turns into a page.

python -m tests.architectures.write            all architectures; takes about 20 minutes
python -m tests.architectures.write bert vit   only these
python -m tests.architectures.write --step rebuild      one step of all of them; the other results stay
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")


def main(names: list[str]) -> None:
    """Tries the named architectures, or all of them, and writes what each step did; after `--step` one step."""
    from tests.architectures.steps import COLUMNS, tried
    from tests.architectures.table import ARCHITECTURES

    steps = COLUMNS
    if "--step" in names:
        place = names.index("--step")
        steps, names = (names[place + 1],), [*names[:place], *names[place + 2 :]]
    shown = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in names or ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            found = {**shown.get(name, {}), **tried(ARCHITECTURES[name], Path(folder), steps)}
        shown[name] = {step: found[step] for step in ("import", *COLUMNS) if step in found}
        print(name, shown[name], flush=True)
        ordered = {name: shown[name] for name in ARCHITECTURES if name in shown}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
