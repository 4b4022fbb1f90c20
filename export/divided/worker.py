"""One rank of a divided model that is served: `python -P worker.py FOLDER RANK RANKS STORE`, started by `export.divided.served`.

It loads its part, connects to the others (NCCL where each rank has a GPU, else gloo) and then answers what it is asked on its standard
input, as all ranks are. Rank 0 answers with the logits, the others with nothing. It ends with its input, and after an error: ranks that
have not made the same sums are out of step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import BinaryIO

sys.dont_write_bytecode = True  # the folder of a served model is hashed: nothing may be added to it
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from safetensors.numpy import load as unpacked
from safetensors.torch import save as packed

from export.divided.frames import ANSWER, ERROR, READY, receive, send
from export.divided.rank import folder_of, load
from export.divided.ranks import Processes
from foundation.models.forward import forward


def main(folder: Path, rank: int, ranks: int, store: Path) -> None:
    """Answers until the input ends."""
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is not an answer
    try:
        on_gpus = torch.cuda.device_count() >= ranks
        device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
        if on_gpus:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if on_gpus else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        model = load(folder_of(folder, rank, ranks), Processes(), device)
        send(answers, READY)
        while (asked := receive(sys.stdin.buffer)) is not None:
            features = {name: torch.from_numpy(values) for name, values in unpacked(asked[1]).items()}
            with torch.inference_mode():
                logits = forward(model, features).cpu().contiguous()
            send(answers, ANSWER, packed({"logits": logits}) if rank == 0 else b"")
    except Exception as error:  # reported to the server, which ends all ranks
        send(answers, ERROR, " ".join(f"{type(error).__name__}: {error}".split())[:500].encode())
        answers.close()
        os._exit(1)  # threads of torch.distributed may wait for ranks that are gone


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
