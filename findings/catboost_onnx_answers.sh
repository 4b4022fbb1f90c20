#!/usr/bin/env bash
# CatBoost 1.2.10: the ONNX file of a model gives other answers than `predict` for counts, for pairs of integer labels, for one-versus-all and for
# a threshold.
# The guess was that what the format cannot say is refused, as models with a scale and labels that are floats are.
#
# Seen (2026-11-29): the file of a regressor with the loss Poisson or Tweedie gives the logarithm of the prediction. A classifier of the labels 5
# and 7 answers 0 and 1 in the output `label`, while its probabilities name 5 and 7; with 9 and 10 too; labels that are texts and three integer
# labels come back as they are. The probabilities of MultiClassOneVsAll are a softmax in the file and sigmoids in CatBoost. A threshold set by
# set_probability_threshold is dropped. Regression and probabilities of two and three classes agree to five digits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq catboost==1.2.10 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
from importlib.metadata import version

import numpy as np
import onnxruntime
from catboost import CatBoost, CatBoostClassifier, CatBoostRegressor

generator = np.random.default_rng(0)
features = (generator.integers(-16, 16, (2000, 5)) / 8).astype(np.float32)
value = np.abs(features[:, 0] + np.sin(features[:, 1])) + 0.1
two = (features[:, 0] + features[:, 1] > 0.5).astype(int)
three = two + (features[:, 2] > 0.7)
settings = {"iterations": 30, "depth": 4, "verbose": 0, "thread_count": 1, "allow_writing_files": False}


def converted(model: CatBoost) -> list:
    model.save_model("model.onnx", format="onnx")
    session = onnxruntime.InferenceSession("model.onnx")
    return session.run(None, {session.get_inputs()[0].name: features})


def table(rows: list) -> np.ndarray:
    return np.array([[row[key] for key in sorted(row)] for row in rows])


print(*(f"{name} {version(name)}" for name in ("catboost", "onnxruntime")))
for loss in ("RMSE", "Quantile", "Poisson", "Tweedie:variance_power=1.5"):
    model = CatBoostRegressor(loss_function=loss, **settings).fit(features, value)
    right, found = model.predict(features), converted(model)[0].ravel()
    same, logarithm = np.allclose(right, found, atol=1e-4), np.allclose(np.log(np.maximum(right, 1e-9)), found, atol=1e-4)
    print(f"{loss}: the file gives the prediction {same}, its logarithm {logarithm}")
    assert (same, logarithm) == ((False, True) if ":" in loss or loss == "Poisson" else (True, False)), "the behaviour has changed"
for labels, target in ((["no", "yes"], two), ([5, 7], two), ([9, 10], two), ([3, 7, 11], three)):
    model = CatBoostClassifier(**settings).fit(features, np.array(labels)[target])
    answers, probabilities = converted(model)
    right = model.predict(features).ravel()
    print(f"labels {labels}: CatBoost answers {sorted(set(right.tolist()))}, the file {sorted(set(np.ravel(answers).tolist()))}, scored {sorted(probabilities[0])}")
    assert np.allclose(table(probabilities), model.predict_proba(features), atol=1e-5)
    wrong = len(labels) == 2 and labels[0] != "no"
    assert np.array_equal(np.ravel(answers), (right == labels[1]).astype(int) if wrong else right), "the behaviour has changed"
model = CatBoostClassifier(loss_function="MultiClassOneVsAll", **settings).fit(features, three)
found, right = table(converted(model)[1]), model.predict_proba(features)
print(f"one versus all: probabilities of a row sum up to {found[0].sum():.3f} in the file, {right[0].sum():.3f} in CatBoost")
raw = model.predict(features, prediction_type="RawFormulaVal")
powers = np.exp(raw - raw.max(axis=1, keepdims=True))
assert np.allclose(found, powers / powers.sum(axis=1, keepdims=True), atol=1e-4), "the behaviour has changed"
assert np.allclose(right, 1 / (1 + np.exp(-raw)), atol=1e-5) and np.abs(found - right).max() > 0.05, "the behaviour has changed"
model = CatBoostClassifier(**settings).fit(features, two)
model.set_probability_threshold(0.05)
others = int((np.ravel(converted(model)[0]) != model.predict(features).ravel()).sum())
print(f"threshold 0.05: {others} of 2000 labels differ")
assert others > 20, "the behaviour has changed"
PYTHON
