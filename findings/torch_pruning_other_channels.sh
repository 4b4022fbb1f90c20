#!/usr/bin/env bash
# torch-pruning 1.6.1, torch 2.13.0: behind some ordinary operations it cuts other input channels from the next layer than the output channels that it cut
# before it.
# The guess was that a dependency which the graph does not understand is refused, or fails with a wrong size, as with PixelShuffle and repeat.
#
# Seen (2026-11-30): half of the filters of a convolution are zero, and the pruner is asked to remove half of them, so that the answers
# should stay. They stay for a chain, for torch.cat of two layers, and for a gate written with chunk. They change where the concatenation
# has something before the layer that no layer made: the network's input (a skip around the first layers, wide and deep networks), a
# pooled input or a buffer of coordinates. Its channels are not counted, so that the first input channels of the next layer go, those of
# the picture among them. Behind a channel shuffle (nn.ChannelShuffle, and view, transpose, reshape as in ShuffleNet), flip, and permute
# before flatten the places are taken to be the old ones as well. Sizes are right and nothing warns: only a comparison of answers before
# and after shows it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 torch-pruning==1.6.1 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
import torch.nn.functional as F
import torch_pruning
from torch import nn

torch.manual_seed(0)
print(f"torch-pruning {version('torch-pruning')}, torch {torch.__version__}")
grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8), indexing="ij"))[None]


class Network(nn.Module):
    """A convolution of 16 filters, an operation, and a layer that reads its result."""

    def __init__(self, between, size, linear=False):
        super().__init__()
        self.first, self.side = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 3, 1)
        self.between, self.last = between, nn.Linear(size, 5) if linear else nn.Conv2d(size, 5, 3)
        self.register_buffer("grid", grid)

    def forward(self, images):
        return self.last(self.between(self, images, self.first(images).relu()))


def shuffle(network, images, maps):
    rows, channels, height, width = maps.shape
    return maps.view(rows, 4, channels // 4, height, width).transpose(1, 2).reshape(rows, channels, height, width)


def gate(network, images, maps):
    left, right = maps.chunk(2, 1)
    return left * right.sigmoid()


cases = [
    ("chain", False, lambda network, images, maps: maps, 16),
    ("cat of two layers", False, lambda network, images, maps: torch.cat([network.side(images), maps], 1), 19),
    ("cat of the layer and the input", False, lambda network, images, maps: torch.cat([maps, images], 1), 19),
    ("gate by chunk", False, gate, 8),
    ("flatten", False, lambda network, images, maps: maps.flatten(1), 1024),
    ("cat of the input and the layer", True, lambda network, images, maps: torch.cat([images, maps], 1), 19),
    ("cat of the pooled input and the layer", True, lambda network, images, maps: torch.cat([F.avg_pool2d(images, 3, 1, 1), maps], 1), 19),
    ("cat of a buffer and the layer", True, lambda network, images, maps: torch.cat([network.grid.expand(len(maps), -1, -1, -1), maps], 1), 18),
    ("nn.ChannelShuffle", True, lambda network, images, maps: nn.functional.channel_shuffle(maps, 4), 16),
    ("shuffle by view and transpose", True, shuffle, 16),
    ("flip of the channels", True, lambda network, images, maps: maps.flip(1), 16),
    ("permute, flatten", True, lambda network, images, maps: maps.permute(0, 2, 3, 1).flatten(1), 1024),
]
images = torch.randn(4, 3, 8, 8)
zero = [1, 2, 5, 7, 9, 10, 13, 15]  # i and i + 8, which a gate needs
for name, wrong, between, size in cases:
    network = Network(between, size, linear="flatten" in name).eval()
    with torch.no_grad():
        network.first.weight[zero] = 0
        network.first.bias[zero] = 0
        before = network(images)
    importance = torch_pruning.importance.GroupMagnitudeImportance(group_reduction="first")
    ignored = [network.last, network.side]
    torch_pruning.pruner.BasePruner(network, images, importance, pruning_ratio=0.5, ignored_layers=ignored).step()
    kept = [row.abs().sum().item() > 0 for row in network.first.weight]
    with torch.no_grad():
        off = float((network(images) - before).norm() / before.norm())
    print(f"{name}: {len(kept)} of 16 filters are left, {sum(kept)} of them not zero, the answers are off by {off:.1%}")
    assert len(kept) == 8 and all(kept)
    assert (off > 0.1) == wrong and (wrong or off < 1e-5), "the behaviour has changed"
PYTHON
