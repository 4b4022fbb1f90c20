#!/usr/bin/env bash
# torchcp 1.2.1, torch 2.13.0: five settings of its intervals and sets do something else than their names say. The guesses were that CQR trains quantiles of
# y given x, that `verbose` decides what is printed, that CQRR widens intervals until they hold the promise, that a weight stays with its example in
# weighted conformal prediction, and that the start of the search for a temperature changes nothing about where it ends.
#
# Seen (2026-11-29): QuantileLoss subtracts predictions of shape [rows] from targets of shape [rows, 1], so that every prediction is compared with the
# target of every row. The network learns the quantiles of all y and ignores x: intervals of 6.0 where the same network, trained row by row, has
# 1.9. Calibration brings both to 90 %, so that the coverage shows nothing. verbose=False trains one epoch, whatever `epochs` says. CQRR multiplies
# its threshold by the width of intervals that are still 0, so that calibration changes nothing: quantiles of 25 and 75 % hold the true value in
# 45 % of all cases under a promise of 90 %, where CQR on the same network has 89 %. WeightedPredictor sorts weights and scores each by itself, so
# that the largest weight goes to the worst score: with the true ratio of densities 90 % become 99.6 %, and sets of 6.5 of 10 classes, where weights
# in their places have 3.3. TSTrainer fits its temperature on logits that init_temperature has divided already, and the model it returns divides
# logits that nothing has divided: init_temperature=1.5, usual in such code, makes 2.0 of a temperature of 3.0. It prints a calibration error of
# 0.01, and the model has 0.13; with 1 both are right. Nothing warns.
# torchsort, which torchcp needs, is compiled at installation, without CUDA if there is no nvcc on the PATH.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 torchvision==0.28.0 transformers==5.23.0 numpy==2.4.6 scikit-learn==1.9.1 torch_geometric==2.8.0 \
    setuptools==84.2.1 wheel==0.47.0
PATH=/usr/bin:/bin "$folder/venv/bin/pip" install -qq --no-compile --no-deps --no-build-isolation torchsort==0.1.10
"$folder/venv/bin/pip" install -qq --no-compile torchcp==1.2.1 torch==2.13.0
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
from importlib.metadata import version

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchcp.classification.predictor import WeightedPredictor
from torchcp.classification.score import LAC
from torchcp.classification.trainer import TSTrainer
from torchcp.regression.predictor import SplitPredictor
from torchcp.regression.score import ABS, CQR, CQRR

PROMISE, EPOCHS = 0.9, 30
torch.manual_seed(0)


def sample(rows):
    """A line with noise that grows with the distance from 0."""
    x = torch.rand(rows, 1) * 2 - 1
    return DataLoader(TensorDataset(x, 3 * x[:, 0] + (0.1 + x[:, 0].abs()) * torch.randn(rows)), batch_size=100)


train, calibration, test = sample(2000), sample(1000), sample(4000)


class Network(torch.nn.Sequential):
    """Counts the steps that it is trained."""

    def __init__(self, outputs):
        torch.manual_seed(1)
        super().__init__(torch.nn.Linear(1, 64), torch.nn.ReLU(), torch.nn.Linear(64, outputs))
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        return super().forward(x)


def row_by_row(*levels):
    """The pinball loss of each row's prediction against the row's own target."""
    network, levels = Network(len(levels)), torch.tensor(levels)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        for x, y in train:
            error = y[:, None] - network(x)
            torch.maximum((levels - 1) * error, levels * error).sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return network


def measured(score, network):
    predictor = SplitPredictor(score, network)
    predictor.calibrate(calibration, 1 - PROMISE)
    return predictor.evaluate(test)


print(f"torchcp {version('torchcp')}, torch {version('torch')}")
trained = Network(2)
SplitPredictor(CQR(), trained).train(train, alpha=1 - PROMISE, epochs=EPOCHS, lr=0.01, verbose=True)
theirs, ours = measured(CQR(), trained), measured(CQR(), row_by_row(0.05, 0.95))
ends = trained(torch.tensor([[-1.0], [1.0]])).mean(1).detach()
print(f"CQR: middles of the intervals at x = -1 and 1, where y is about -3 and 3: {ends[0]:.2f}, {ends[1]:.2f}")
print("CQR, trained by torchcp:", theirs, "trained row by row:", ours)
assert ends.abs().max() < 0.5 and theirs["average_size"] > 2.5 * ours["average_size"], "the behaviour has changed"
assert min(theirs["coverage_rate"], ours["coverage_rate"]) > 0.87, "the behaviour has changed"

steps = {}
for verbose in (True, False):
    network = Network(1)
    SplitPredictor(ABS(), network).train(train, epochs=EPOCHS, lr=0.01, verbose=verbose)
    steps[verbose] = network.steps
print(f"steps of {EPOCHS} epochs of 20 batches: {steps[True]} with verbose=True, {steps[False]} with verbose=False")
assert steps == {True: 20 * EPOCHS, False: 20}, "the behaviour has changed"

narrow = row_by_row(0.25, 0.75)
coverage = {type(score).__name__: measured(score, narrow)["coverage_rate"] for score in (CQR(), CQRR())}
print(f"coverage under a promise of {PROMISE}, from quantiles of 25 and 75 %:", coverage)
assert coverage["CQR"] > 0.87 and coverage["CQRR"] < 0.6, "the behaviour has changed"

CLASSES, ROWS, SPREAD, ALPHA = 10, 5000, 0.7, 0.1
torch.manual_seed(0)
directions = torch.randn(2, CLASSES) * 2


class Classifier(torch.nn.Module):
    """Knows the true probabilities; the first feature says how easy a row is."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.factor * (x[:, 1:] @ directions) * torch.exp(x[:, :1])


class Domain(torch.nn.Module):
    """Knows the true probability of source and target."""

    def __init__(self, source, target):
        super().__init__()
        self.source, self.target = source, target

    def forward(self, x):
        logit = ((self.target - self.source) * x[:, 0] - (self.target**2 - self.source**2) / 2) / SPREAD**2
        return torch.stack([torch.sigmoid(-logit), torch.sigmoid(logit)], 1)


classifier = Classifier()


def drawn(ease):
    x = torch.randn(ROWS, 3)
    x[:, 0] = x[:, 0] * SPREAD + ease
    with torch.no_grad():
        return x, torch.distributions.Categorical(logits=classifier(x)).sample()


def in_place(calibration, test, domain):
    """Weighted conformal prediction, each weight with its own score: the coverage and the size of the sets."""
    with torch.no_grad():
        worth = [domain(x)[:, 1] / domain(x)[:, 0] for x, _ in (calibration, test)]
        scores = 1 - classifier(calibration[0]).softmax(1)[torch.arange(ROWS), calibration[1]]
        order = scores.argsort()
        weights = torch.cat([worth[0][order].expand(ROWS, -1), worth[1][:, None]], 1)
        reached = (weights / weights.sum(1, keepdim=True)).cumsum(1) >= 1 - ALPHA
        limit = torch.cat([scores[order], torch.tensor([torch.inf])])[reached.int().argmax(1)]
        sets = 1 - classifier(test[0]).softmax(1) <= limit[:, None]
    return sets[torch.arange(ROWS), test[1]].float().mean().item(), sets.sum(1).float().mean().item()


def loaded(rows):
    return DataLoader(TensorDataset(*rows), batch_size=500)


results = {}
for source, target in ((1.0, 0.0), (0.0, 0.0)):
    calibration, test, domain = drawn(source), drawn(target), Domain(source, target)
    predictor = WeightedPredictor(LAC(), classifier, alpha=ALPHA, image_encoder=torch.nn.Identity(), domain_classifier=domain)
    predictor.calibrate(loaded(calibration), ALPHA)
    theirs, right = predictor.evaluate(loaded(test)), in_place(calibration, test, domain)
    results[source] = theirs["coverage_rate"], theirs["average_size"], *right
    print(f"shift {source - target}: coverage {results[source][0]:.3f}, {results[source][1]:.2f} classes a set; each weight in its place {right[0]:.3f}, {right[1]:.2f}")
assert results[1.0][0] > 0.98 and results[1.0][1] > 1.7 * results[1.0][3] and 0.86 < results[1.0][2] < 0.92, "the behaviour has changed"
assert abs(results[0.0][0] - results[0.0][2]) < 0.005, "the behaviour has changed"


class Loud(torch.nn.Module):
    def forward(self, logits):
        return 3 * logits


def calibration_error(logits, labels):
    confidence, answer = logits.softmax(1).max(1)
    bins = (confidence * 15).ceil().long()
    gaps = [(bins == one).float().mean() * ((answer == labels).float() - confidence)[bins == one].mean().abs() for one in bins.unique()]
    return sum(gaps).item()


logits = torch.randn(20000, CLASSES) * 2
labels = torch.distributions.Categorical(logits=logits).sample()
errors, temperatures = {}, {}
for start in (1.0, 1.5, 2.0):
    model = TSTrainer(Loud(), start, device="cpu").train(DataLoader(TensorDataset(logits, labels), batch_size=1000), lr=0.1)
    with torch.no_grad():
        errors[start], temperatures[start] = calibration_error(model(logits), labels), model.temperature.item()
    print(f"init_temperature={start}: temperature {temperatures[start]:.2f}, calibration error of the model {errors[start]:.3f}")
assert errors[1.0] < 0.02 and errors[1.5] > 0.1 and errors[2.0] > errors[1.5] and abs(temperatures[1.5] * 1.5 - temperatures[1.0]) < 0.05, "the behaviour has changed"
PYTHON
