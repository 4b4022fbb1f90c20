"""One rank of divided models among real processes; run by `test_processes.py` as `rank_process.py FOLDER`.

FOLDER holds, for each model, the folders of its ranks, and features.pt; every process writes the logits that it has.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from export.divided.rank import folder_of, load
from export.divided.ranks import Processes
from foundation.machine.parallel import joined, leave
from foundation.models.forward import forward


def together(folder: Path) -> None:
    """Answers the features of every model in FOLDER."""
    with joined() as team, torch.inference_mode():
        found = {}
        for model in sorted(path for path in folder.iterdir() if path.is_dir()):
            rank = load(folder_of(model, team.rank, team.size), Processes())
            found[model.name] = forward(rank, torch.load(model / "features.pt"))
        torch.save(found, folder / f"logits-{team.rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    together(Path(sys.argv[1]))
    leave(0)
