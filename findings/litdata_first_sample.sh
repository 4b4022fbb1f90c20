#!/usr/bin/env bash
# litdata 0.2.76: the first sample decides how all others are read, a palette image comes back black, and train_test_split shuffles no samples.
# The guesses were that a number or an image that was written comes back, or is refused as an int among floats is, and that "shuffle the data before
# splitting", the default, draws the test set from all samples.
#
# Seen (2026-11-30): type and number of axes of a tensor or array are noted once, of the first sample. Where token ids are int64 and then int32, two
# ids come back as one, 17179869187 for 3 and 4, and the length is halved. Floats among integers are read as the integers with the same bits. A matrix
# behind a vector is flattened. Images of PNG with a palette (mode "P", as small pictures and diagrams have it) are stored without the palette:
# every pixel is 0, 0, 0. train_test_split shuffles whole chunks of 64 MB, and a text classification set is one chunk: the test set is the last 20 %,
# and where the samples come class by class it holds two classes of ten. With ten chunks it holds two of them. Nothing warns. Lightning-AI/litData#673
# says of the split as well that it shuffles the data set. Integers, texts, images in RGB and L, and a first sample of the widest type are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 numpy==2.4.6 pillow==13.0.0 requests==2.34.2 tifffile==2026.3.3 boto3==1.44.8 filelock==4.2.11 \
  lightning-utilities==0.15.3 urllib3==2.8.0
"$folder/venv/bin/pip" install -qq --no-compile --no-deps litdata==0.2.76
cat >"$folder/show.py" <<'PYTHON'
import io
import sys
from importlib.metadata import version

import numpy as np
import torch
from litdata import StreamingDataset, optimize, train_test_split
from PIL import Image

FOLDER = sys.argv[1]
random = np.random.default_rng(0)


def palette_image():
    buffer = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (8, 8, 3)).astype(np.uint8)).quantize(16).save(buffer, "PNG")
    return Image.open(buffer)


IMAGE = palette_image()
PAIRS = {
    "arrays of int64 and int32": (np.array([1, 2]), np.array([3, 4], np.int32)),
    "tensors of int64 and float32": (torch.tensor([1, 2]), torch.tensor([1.5, 2.5])),
    "a vector and a matrix": (torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0]])),
    "a palette image": (IMAGE, IMAGE),
    "an image in RGB": (IMAGE.convert("RGB"), IMAGE.convert("RGB")),
    "two arrays of int64": (np.array([1, 2]), np.array([3, 4])),
}


def one_of_each(place):
    return {name: pair[place] for name, pair in PAIRS.items()}


def labelled(row):
    return {"row": row, "label": row // 100}


def stored(name, function, inputs, **size):
    path = f"{FOLDER}/{name.replace(' ', '_')}"
    optimize(function, inputs, path, num_workers=1, **size)
    return StreamingDataset(path)


def test_classes(name, **size):
    rows = [sample["row"] for sample in train_test_split(stored(name, labelled, list(range(1000)), **size), [0.8, 0.2])[1]]
    return rows, sorted({row // 100 for row in rows})


if __name__ == "__main__":
    lines, back = [f"litdata {version('litdata')}, torch {torch.__version__}, numpy {np.__version__}"], {}
    second = stored("pairs", one_of_each, [0, 1], chunk_bytes="64MB")[1]
    for name, pair in PAIRS.items():
        value = second[name]
        if isinstance(value, Image.Image):
            back[name] = np.asarray(value.convert("RGB")).reshape(-1, 3)
            lines.append(f"{name}: {back[name][:2].tolist()} for {np.asarray(IMAGE.convert('RGB')).reshape(-1, 3)[:2].tolist()}")
        else:
            back[name] = value.tolist()
            lines.append(f"{name}: {back[name]} for {pair[1].tolist()}")
    rows, classes = test_classes("one chunk", chunk_bytes="64MB")
    lines.append(f"1,000 samples of ten classes, one chunk: the test set holds {rows[0]} to {rows[-1]}, the classes {classes}")
    few_rows, few_classes = test_classes("ten chunks", chunk_size=100)
    lines.append(f"ten chunks: {len(few_rows)} samples of the classes {few_classes}")
    print("\n".join(lines))
    colours = np.asarray(IMAGE.convert("RGB")).reshape(-1, 3)
    assert (back["an image in RGB"] == colours).all() and back["two arrays of int64"] == [3, 4]
    changed = "the behaviour has changed"
    assert back["arrays of int64 and int32"] == [3 + 4 * 2**32] and back["a vector and a matrix"] == [3, 4], changed
    assert back["tensors of int64 and float32"] == np.array([1.5, 2.5], np.float32).view(np.int64).tolist(), changed
    assert (back["a palette image"] == 0).all() and colours.any(), changed
    assert rows == list(range(800, 1000)) and len(few_rows) == 200 and len(few_classes) == 2, changed
PYTHON
cd "$folder"
OMP_NUM_THREADS=1 HOME="$folder" "$folder/venv/bin/python" -W ignore "$folder/show.py" "$folder" >"$folder/out" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
tail -n 9 "$folder/out"
