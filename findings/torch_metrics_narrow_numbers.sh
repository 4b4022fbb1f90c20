#!/usr/bin/env bash
# torchmetrics 1.9.0, torcheval 0.0.7, torch 2.13.0: errors, R2 and perplexity are computed in the type that comes in. The guesses were that the error of
# two 8-bit images is not an 8-bit number, that R2 stays what it is when a constant is added to targets and predictions, and that one rare token has
# a finite loss, as it has in cross_entropy.
#
# Seen (2026-11-29): differences of uint8 images are kept modulo 256, squares as well. Of an image that is 16 grey levels too bright MSE is 0 (both
# packages) and PSNR infinite (torcheval; torchmetrics is right here), of one that is one level too dark MAE is 255 (torchmetrics). SSIM refuses uint8.
# R2 and explained variance (torchmetrics) are differences of sums of squares in float32. For 5,000 targets around 10,000 with a standard deviation of
# 1, guesses that are noise have an R2 between 0.9 and 1.1, or none, where scikit-learn has -1; around 1,000 two digits are right. Both packages take
# the softmax first and its logarithm afterwards: float16 logits with one token of 2,000 that is less likely than 3e-8 have an
# infinite perplexity where cross_entropy has 1 % more than without it. Nothing warns. `.float()` on images and logits, `.double()` for R2 is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torcheval==0.0.7 torchmetrics==1.9.0 torch==2.13.0 scikit-learn==1.9.1 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import math
from importlib.metadata import version

import torch
import torcheval.metrics.functional as evals
import torchmetrics.functional as metrics
from sklearn.metrics import r2_score
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
print(*(f"{name} {version(name)}" for name in ("torchmetrics", "torcheval", "torch")))
image = torch.randint(30, 220, (3, 64, 64), dtype=torch.uint8)


def images(name, metric, change):
    """The metric of an image and its changed copy, as uint8 and as float32."""
    narrow, wide = (float(metric(*(pixels.to(kind).flatten() for pixels in (image + change, image)))) for kind in (torch.uint8, torch.float32))
    print(f"{name}, grey levels {change:+d}: {narrow:.2f} of uint8, {wide:.2f} of float32")
    return narrow, wide


assert images("torchmetrics MSE", metrics.mean_squared_error, 16) == (0, 256), "the behaviour has changed"
assert images("torcheval MSE", evals.mean_squared_error, 16) == (0, 256), "the behaviour has changed"
assert images("torchmetrics MAE", metrics.mean_absolute_error, -1) == (255, 1), "the behaviour has changed"
assert math.isinf(images("torcheval PSNR", lambda *pair: evals.peak_signal_noise_ratio(*pair, data_range=255.0), 16)[0]), "the behaviour has changed"
fine = images("torchmetrics PSNR", lambda *pair: metrics.peak_signal_noise_ratio(*pair, data_range=255.0), 16)
assert abs(fine[0] - fine[1]) < 0.01, "the behaviour has changed"

noise, guess = torch.randn(2, 5000)
for offset in (0.0, 1e4):
    target, answer = noise + offset, guess + offset
    exact = r2_score(target.double(), answer.double())
    for name, metric in (("torchmetrics R2", metrics.r2_score), ("torchmetrics explained variance", metrics.explained_variance), ("torcheval R2", evals.r2_score)):
        theirs = float(metric(answer, target))
        print(f"{name} of noise, targets around {offset:g}: {theirs:.3f}, scikit-learn R2 {exact:.3f}")
        assert (abs(theirs - exact) < 0.01) == (offset == 0) and -1.2 < exact < -0.8, "the behaviour has changed"
    assert abs(float(metrics.r2_score(answer.double(), target.double())) - exact) < 1e-3, "the behaviour has changed"

logits = torch.randn(1, 2000, 500).half() * 4
tokens = torch.distributions.Categorical(logits=logits.float()).sample()
for name in ("ordinary tokens", "one rare token of 2,000"):
    theirs = [float(metric(logits, tokens)) for metric in (metrics.text.perplexity, evals.perplexity)]
    right = cross_entropy(logits[0].float(), tokens[0]).exp().item()
    print(f"perplexity of float16 logits, {name}: {theirs[0]:.3f} and {theirs[1]:.3f}, cross_entropy {right:.3f}")
    assert [math.isinf(value) for value in theirs] == [name != "ordinary tokens"] * 2 and 7 < right < 8, "the behaviour has changed"
    tokens[0, 0] = logits[0, 0].argmin()
PYTHON
