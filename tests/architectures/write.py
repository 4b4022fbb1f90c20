"""Runs every step on every architecture of the table and writes the results, which `docs/generate.py` turns into a page.

python -m tests.architectures.write            all architectures; takes about 20 minutes
python -m tests.architectures.write bert vit   only these
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")


def main(names: list[str]) -> None:
    """Tries the named architectures, or all of them, and writes what each step did."""
    from tests.architectures.steps import tried
    from tests.architectures.table import ARCHITECTURES

    shown = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in names or ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            shown[name] = tried(ARCHITECTURES[name], Path(folder))
        print(name, shown[name], flush=True)
        ordered = {name: shown[name] for name in ARCHITECTURES if name in shown}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
