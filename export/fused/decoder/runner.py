"""Opens the file of a decoder's plan and answers: logits of every token of texts, and texts that are written with a cache.

On a GPU tiles are measured (`export.fused.tuning`) and steps recorded (`texts`); whole texts run kernel by kernel. In the interpreter
everything runs as it is.

Shape suffixes: n rows, L tokens of a padded row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from export.fused.decoder.cache import SLOTS
from export.fused.decoder.forward import Decoder
from export.fused.decoder.plan import DecoderPlan, read_decoder
from export.fused.decoder.texts import Texts
from export.fused.graphs import record_on_gpu
from export.fused.layers import Probe
from export.fused.rows import Rows, pack
from export.fused.runner import DTYPES
from export.fused.tuning import tuner
from export.kernels.launch import cdiv
from foundation.core.arrays import Features


class DecoderRunner:
    """A plan that answers.

    Args:
        path: What `export.fused.decoder.plan.write_decoder` wrote.
        device: cuda, or cpu in a process that interprets kernels.
        float_precision: fp32 or fp16, of what is float, keys and values among it.

    Raises:
        InputError: The file cannot be used.
    """

    def __init__(self, path: Path, device: str, float_precision: str) -> None:
        self.device, self.float_precision = torch.device(device), float_precision
        self._on_gpu = self.device.type == "cuda"
        self.dtype = DTYPES[float_precision]
        self._decoder = Decoder(read_decoder(path), self.device, self.dtype, tuner(self.device) if self._on_gpu else None)

    @property
    def plan(self) -> DecoderPlan:
        """The plan, on the device."""
        return self._decoder.plan

    @property
    def provider(self) -> str:
        """Library that runs the kernels, and its version."""
        return f"triton {triton.__version__}" if self._on_gpu else "triton interpreter"

    def predict(self, features: Features) -> NDArray[np.float32]:
        """Returns the logits of every token, float32 [n, L, V], 0 for padding; see `export.fused.rows.pack`.

        Raises:
            InputError: A row is no row of this model.
        """
        rows = self._packed(features)
        shape = np.asarray(features["input_ids"]).shape
        with self.on_device(), torch.inference_mode():
            logits_TV = self._decoder.forward(rows.to(self.device)).cpu().numpy()
        lengths = np.diff(rows.start.numpy())
        if (lengths == shape[1]).all():  # nothing is padded, and logits are large
            whole: NDArray[np.float32] = logits_TV.reshape(*shape, -1)
            return whole
        found = np.zeros((*shape, logits_TV.shape[1]), np.float32)
        found[np.arange(shape[1]) < lengths[:, None]] = logits_TV
        return found

    def probe(self, features: Features) -> dict[str, Probe]:
        """Returns the inputs and products of every int8 layer, by its path."""
        with self.on_device(), torch.inference_mode():
            return self._decoder.probe(self._packed(features).to(self.device))[1]

    def texts(self, lengths: Sequence[int]) -> Texts:
        """Returns a cache without a text.

        Args:
            lengths: Tokens of the longest texts that there is room for at once, answers included.
        """
        return self.texts_within(sum(cdiv(length, SLOTS) * SLOTS for length in lengths), max(lengths, default=None))

    def texts_within(self, tokens: int, longest: int | None) -> Texts:
        """Returns a cache without a text.

        Args:
            tokens: Tokens that all texts together have room for; whole pages.
            longest: Most tokens of a text; None: what the model reads.
        """
        return Texts(self._decoder, tokens, record_on_gpu if self._on_gpu else None, longest=longest)

    def on_device(self) -> AbstractContextManager[object]:
        """The Triton language launches on the current device, wherever its tensors are."""
        return torch.cuda.device(self.device) if self._on_gpu else nullcontext()

    def _packed(self, features: Features) -> Rows:
        return pack(features, self._decoder.limits)
