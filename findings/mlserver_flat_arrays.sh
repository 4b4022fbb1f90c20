#!/usr/bin/env bash
# mlserver 1.7.1: an array of n numbers comes back as a table of n rows and one column. The guess was that NumpyCodec decodes what it encoded, since it
# writes the shape next to the numbers.
#
# Seen (2026-11-29): a shape [n] is written as [n, 1] before it is sent, in requests and responses, and read as such. The answers of a scikit-learn model,
# which are [n], compared with n labels then make a table of n times n comparisons in NumPy: a classifier that is right in every case has an
# accuracy of 0.50 for two classes and of 0.10 for ten, and a perfect regression a mean squared error of twice the variance. Arrays of more
# dimensions, and metrics of scikit-learn, are right. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile mlserver==1.7.1 scikit-learn==1.9.1 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
from importlib.metadata import version

import numpy as np
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse
from sklearn.metrics import accuracy_score


def served(answers):
    """The answers as a client reads them: encoded, written as JSON, read and decoded."""
    text = InferenceResponse(model_name="m", outputs=[NumpyCodec.encode_output("predict", answers)]).model_dump_json()
    return NumpyCodec.decode_output(InferenceResponse.model_validate_json(text).outputs[0])


random = np.random.default_rng(0)
print(f"mlserver {version('mlserver')}, numpy {version('numpy')}")
for classes in (2, 10):
    labels = random.integers(0, classes, 1000)
    answers = served(labels)
    accuracy, right = float((answers == labels).mean()), accuracy_score(labels, answers)
    print(f"{classes} classes, every answer right: sent {labels.shape}, received {answers.shape}; mean of equal labels {accuracy:.2f}, scikit-learn {right:.2f}")
    assert answers.shape == (1000, 1) and abs(accuracy - 1 / classes) < 0.02 and right == 1, "the behaviour has changed"
target = random.normal(0, 3, 1000)
error = float(((served(target) - target) ** 2).mean())
print(f"regression, every answer right: mean squared error {error:.2f}, variance {target.var():.2f}")
assert abs(error - 2 * target.var()) < 1e-6, "the behaviour has changed"
table = random.normal(size=(4, 3))
assert np.array_equal(served(table), table), "the behaviour has changed"
PYTHON
