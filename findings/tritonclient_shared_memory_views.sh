#!/usr/bin/env bash
# tritonclient 2.73.0: numbers that were read from shared memory change when the next answer is written there. The guess was that
# get_contents_as_numpy returns the contents, as as_numpy of an ordinary answer does: the documentation says that it generates an array.
#
# Seen (2026-11-28): arrays of numbers are views of the region, arrays of BYTES are copies. Whoever keeps the answers of four requests that share an
# output region holds four times the last one, for texts all four. Nothing warns, and the arrays can be written to, which changes the region, and
# with it an input that is sent next. np.array(...) around the call makes the copy. No server is needed to see it: the second half of the
# exchange, writing the answer into the region, is done by the client's own function here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq "tritonclient[http]==2.73.0" numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import uuid
from importlib.metadata import version

import numpy as np
from tritonclient.utils import serialize_byte_tensor, shared_memory

SIZE = 64
answers = [np.full(4, number, np.float32) for number in range(4)]
texts = [np.array([f"answer {number}".encode()], dtype=np.object_) for number in range(4)]
name = f"findings-{uuid.uuid4().hex[:8]}"
region = shared_memory.create_shared_memory_region(name, f"/{name}", SIZE)
try:
    kept = []
    for answer in answers:
        shared_memory.set_shared_memory_region(region, [answer])
        kept.append(shared_memory.get_contents_as_numpy(region, np.float32, [4]))
    numbers = [float(array[0]) for array in kept]
    writable = kept[0].flags.writeable
    read = []
    for text in texts:
        shared_memory.set_shared_memory_region(region, [serialize_byte_tensor(text)])
        read.append(shared_memory.get_contents_as_numpy(region, np.object_, [1]))
    words = [array[0].decode() for array in read]
    del kept  # a view keeps the region from being closed
finally:
    shared_memory.destroy_shared_memory_region(region)
print(f"tritonclient {version('tritonclient')}: four answers kept as numbers {numbers}, as texts {words}, numbers writable: {writable}")
assert numbers == [3.0] * 4 and writable and words == [f"answer {number}" for number in range(4)], "the behaviour has changed"
PYTHON
