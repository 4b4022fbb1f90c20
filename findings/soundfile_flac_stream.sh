#!/usr/bin/env bash
# soundfile 0.14.0 (libsndfile 1.2.2) cannot read a FLAC file that does not say how many samples it has, though FLAC allows that: 36 bits of
# STREAMINFO are 0 where an encoder writes to a pipe. The guess was that all samples come back.
#
# Seen: `frames` is 2^63 - 1, `read(4096)` in turn raises "Internal psf_fseek() failed" before the end, because soundfile seeks to the
# end of each block, and the last one has none. A file that says it cannot seek gives all samples.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet soundfile==0.14.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import io

import numpy as np
import soundfile

samples = (np.random.default_rng(0).standard_normal(20_000) * 3000).astype(np.int16)
file = io.BytesIO()
soundfile.write(file, samples, 16_000, format="FLAC")
data = bytearray(file.getvalue())
data[21] &= 0xF0  # the 36 bits of "total samples", of which 0 means unknown
data[22:26] = bytes(4)


def read(block: int, seeks: bool) -> str:
    with soundfile.SoundFile(io.BytesIO(bytes(data))) as stream:
        assert stream.frames == 2**63 - 1, stream.frames
        if not seeks:
            stream.seekable = lambda: False
        found = []
        try:
            while len(part := stream.read(block, dtype="int16")):
                found.append(part)
        except soundfile.LibsndfileError as error:
            return str(error)
        return "all samples" if np.array_equal(np.concatenate(found), samples) else "other samples"


for block, seeks, expected in ((4096, True, "psf_fseek() failed"), (4096, False, "all samples")):
    outcome = read(block, seeks)
    print(f"soundfile {soundfile.__version__}, blocks of {block}, may seek: {seeks}: {outcome}")
    assert expected in outcome, "the behaviour has changed"
PYTHON
