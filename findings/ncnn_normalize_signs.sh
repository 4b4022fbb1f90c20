#!/usr/bin/env bash
# ncnn 1.0.20261020, pnnx 20261020: torch.nn.functional.normalize of vectors, the last step of a text embedding model, becomes a layer that gives
# the sign of each number.
# The guess was that `dim`, `p` and `eps` are kept, or the conversion fails, since ncnn's layer Normalize was made for the channels of images.
#
# Seen (2026-11-29): whatever the shape, `dim`, `p` and `eps`, pnnx writes the same layer (`Normalize 0=0 1=1 2=1.0e-12`), which divides by the
# norm over the first axis of a map. Only [channels, height, width] with dim=0 is right. One or four vectors of length 8, and the mean of the
# tokens [1, 4, 8], become 1 and -1, so that each cosine is a count of equal signs. The mean alone is right. Nothing warns, and layer_norm, GELU,
# softmax and erf agree to six digits. log_softmax of -16 ... 200 has NaN, softplus(100) is infinite.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 ncnn==1.0.20261020 pnnx==20261020 numpy==2.4.6
cd "$folder"
OMP_NUM_THREADS=1 PATH="$folder/venv/bin:$PATH" "$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import subprocess
from collections.abc import Callable
from importlib.metadata import version

import ncnn
import numpy as np
import torch
from torch.nn import functional


class Model(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def answers(function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """What ncnn and torch answer."""
    model = Model(function).eval()
    torch.jit.trace(model, values).save("one.pt")
    shape = str([*values.shape]).replace(" ", "")
    subprocess.run(["pnnx", "one.pt", f"inputshape={shape}", "fp16=0"], check=True, capture_output=True)
    network = ncnn.Net()
    network.opt.num_threads = 1
    assert network.load_param("one.ncnn.param") == 0 and network.load_model("one.ncnn.bin") == 0
    extractor = network.create_extractor()
    extractor.input("in0", ncnn.Mat(values.numpy()).clone())
    right = model(values).numpy()
    return np.array(extractor.extract("out0")[1]).reshape(right.shape), right


torch.manual_seed(0)
print(*(f"{name} {version(name)}" for name in ("ncnn", "pnnx", "torch")))
for name, function, shape, signs in (
    ("normalize, dim=-1", lambda x: functional.normalize(x, dim=-1), (1, 8), True),
    ("normalize, dim=-1", lambda x: functional.normalize(x, dim=-1), (4, 8), True),
    ("normalize, dim=1, p=1", lambda x: functional.normalize(x, p=1, dim=1), (1, 8), True),
    ("normalize of the mean", lambda x: functional.normalize(x.mean(1), dim=-1), (1, 4, 8), True),
    ("normalize, dim=0", lambda x: functional.normalize(x, dim=0), (4, 3, 3), False),
    ("mean", lambda x: x.mean(1), (1, 4, 8), False),
    ("layer_norm, eps=0.1", lambda x: functional.layer_norm(x, (8,), eps=0.1), (4, 8), False),
    ("gelu", functional.gelu, (4, 8), False),
    ("softmax", lambda x: functional.softmax(x, -1), (4, 8), False),
):
    found, right = answers(function, torch.randn(*shape))
    print(f"{name} of {list(shape)}: {found.ravel()[:3].round(4).tolist()}, in torch {right.ravel()[:3].round(4).tolist()}")
    assert np.allclose(found, np.sign(right) if signs else right, atol=1e-4), "the behaviour has changed"
large = torch.tensor([[-16.0, 1.0, 100.0, 200.0] * 2])
found, right = answers(lambda x: functional.log_softmax(x, -1), large)
print(f"log_softmax: {found[0, :4].tolist()}, in torch {right[0, :4].tolist()}")
assert np.isnan(found).any(), "the behaviour has changed"
found, right = answers(functional.softplus, large)
print(f"softplus: {found[0, :4].tolist()}, in torch {right[0, :4].tolist()}")
assert np.isinf(found).any(), "the behaviour has changed"
PYTHON
