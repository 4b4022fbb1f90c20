#!/usr/bin/env bash
# torch 2.13.0, torchinfo 1.8.0, thop 0.1.1, ptflops 0.7.5, calflops 0.3.2, torchprofile 0.1.0, torch-pruning 1.6.1: whoever exports a model or counts its
# operations between two epochs trains another one afterwards.
# The guess was that a module which is only looked at comes back as it was: in training or not, layer by layer, with the statistics that it had.
#
# Seen (2026-12-01), a network in training whose batch normalization is frozen (in eval mode, as detectors are fine-tuned): torch.onnx.export with
# dynamo=False, torchinfo and thop remember one mode for the whole network, and set every layer to it. The normalization is in training again: ten steps
# later its mean has moved, and nothing warns. A wrapper that was built around a model in eval mode, and is in training itself as every new module,
# has an active dropout after the same three: its answers vary. ptflops, calflops and the DependencyGraph of torch-pruning leave everything in eval mode:
# training goes on without dropout and with constant statistics, unless the loop calls train(), which thaws what was frozen. torchprofile leaves the
# modes, and mixes its example into the running mean. torch.onnx.export with dynamo=True, and count_ops_and_params of torch-pruning, change nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0 prettytable==3.17.0 pandas==2.3.3
"$folder/venv/bin/pip" install -qq --no-compile --no-deps torchinfo==1.8.0 thop==0.1.1.post2209072238 ptflops==0.7.5 calflops==0.3.2 \
  torchprofile==0.1.0 torch-pruning==1.6.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import contextlib
import io

import calflops
import ptflops
import thop
import torch
import torch_pruning
import torchinfo
import torchprofile

SHAPE = (3, 8, 8)
EXAMPLE = torch.randn(2, *SHAPE)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.normalization = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)
        self.dropout, self.linear = torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)

    def forward(self, images):
        return self.linear(self.dropout(self.normalization(self.convolution(images)).mean((2, 3))))


TOOLS = {
    "torch.onnx.export, dynamo=False": lambda model: torch.onnx.export(model, (EXAMPLE,), io.BytesIO(), dynamo=False),
    "torch.onnx.export, dynamo=True": lambda model: torch.onnx.export(model, (EXAMPLE,), dynamo=True),
    "torchinfo": lambda model: torchinfo.summary(model, input_data=EXAMPLE, verbose=0),
    "thop": lambda model: thop.profile(model, (EXAMPLE,), verbose=False),
    "ptflops": lambda model: ptflops.get_model_complexity_info(model, SHAPE, print_per_layer_stat=False, verbose=False),
    "calflops": lambda model: calflops.calculate_flops(model, input_shape=(1, *SHAPE), print_results=False),
    "torch-pruning, DependencyGraph": lambda model: torch_pruning.DependencyGraph().build_dependency(model, EXAMPLE),
    "torch-pruning, count_ops_and_params": lambda model: torch_pruning.utils.count_ops_and_params(model, EXAMPLE),
    "torchprofile": lambda model: torchprofile.profile_macs(model, EXAMPLE),
}


def used(tool, model):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        TOOLS[tool](model)
    return model


def frozen(tool):
    """Modes of network and normalization, and how far the mean of the frozen normalization moves in ten steps."""
    network = Network().train()
    network.normalization.eval()
    used(tool, network)
    modes = network.training, network.normalization.training
    for _ in range(10):
        network(torch.randn(2, *SHAPE) + 5)
    return *modes, network.normalization.running_mean.abs().max().item()


def wrapped(tool):
    """Whether a model in eval mode, inside of a new module, answers twice the same."""
    wrapper = used(tool, torch.nn.Sequential(Network().eval()))
    return torch.equal(wrapper(EXAMPLE), wrapper(EXAMPLE))


def counted(tool):
    """Whether the statistics of a network in training are as they were."""
    return not used(tool, Network().train()).normalization.running_mean.any().item()


SEEN = {  # network in training, frozen normalization in training, its mean moves, wrapped model answers twice the same, statistics stay
    "torch.onnx.export, dynamo=False": (True, True, True, False, True),
    "torch.onnx.export, dynamo=True": (True, False, False, True, True),
    "torchinfo": (True, True, True, False, True),
    "thop": (True, True, True, False, True),
    "ptflops": (False, False, False, True, True),
    "calflops": (False, False, False, True, True),
    "torch-pruning, DependencyGraph": (False, False, False, True, True),
    "torch-pruning, count_ops_and_params": (True, False, False, True, True),
    "torchprofile": (True, False, False, True, False),
}
torch.manual_seed(0)
print(f"torch {torch.__version__}")
for tool in TOOLS:
    training, thawed, moved = frozen(tool)
    same, kept = wrapped(tool), counted(tool)
    print(
        f"{tool}: network in training {training}, frozen normalization in training {thawed}, its mean moves by {moved:.1f}; "
        f"a wrapped model in eval mode answers twice the same {same}; statistics stay {kept}"
    )
    assert (training, thawed, moved > 0.1, same, kept) == SEEN[tool], "the behaviour has changed"
PYTHON
