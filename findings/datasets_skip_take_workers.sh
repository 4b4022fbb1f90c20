#!/usr/bin/env bash
# datasets 5.2.0, torch 2.13.0: what `skip(n)` leaves out and what `take(n)` gives depends on the workers of the DataLoader. The guess was that
# stream.skip(1000) never gives an example of stream.take(1000): the documentation splits a stream into training and validation this way.
#
# Seen (2026-11-28): in a DataLoader with workers each worker skips n / workers examples of its own files. Without workers `take` gives the first n
# examples, of the first files. With 8 files of 100 examples, 200 examples for validation read without workers and training with 4 workers, half of
# the validation examples are trained on, and as many others are seen by neither. Nothing warns. With as many workers for both the parts are apart,
# but are other ones than without workers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq datasets==5.2.0 torch==2.13.0
HF_HOME="$folder/cache" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from importlib.metadata import version
from pathlib import Path

from datasets import IterableDataset, load_dataset
from torch.utils.data import DataLoader

FILES, EACH, HELD_OUT = 8, 100, 200
for number in range(FILES):
    rows = [json.dumps({"id": number * EACH + row}) for row in range(EACH)]
    Path(sys.argv[1], f"{number}.jsonl").write_text("\n".join(rows))
files = [f"{sys.argv[1]}/{number}.jsonl" for number in range(FILES)]
stream = load_dataset("json", data_files=files, split="train", streaming=True)


def seen(examples: IterableDataset, workers: int) -> set[int]:
    loaded = [int(example["id"]) for example in DataLoader(examples, batch_size=None, num_workers=workers)]
    assert len(loaded) == len(set(loaded))
    return set(loaded)


if __name__ == "__main__":
    print(f"datasets {version('datasets')}, {stream.num_shards} files")
    everything = set(range(FILES * EACH))
    held_out = {workers: seen(stream.take(HELD_OUT), workers) for workers in (0, 4)}
    trained = {workers: seen(stream.skip(HELD_OUT), workers) for workers in (0, 4)}
    for workers in (0, 4):
        both, neither = held_out[0] & trained[workers], everything - held_out[0] - trained[workers]
        print(f"training with {workers} workers: {len(both)} of {HELD_OUT} validation examples are trained on, {len(neither)} are in neither")
    assert held_out[0] == set(range(HELD_OUT)) and trained[0] == everything - held_out[0]
    assert trained[4] == everything - held_out[4] and held_out[4] != held_out[0], "the behaviour has changed"
    assert len(held_out[0] & trained[4]) == len(everything - held_out[0] - trained[4]) == 100, "the behaviour has changed"
PYTHON
