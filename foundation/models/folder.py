"""A checkpoint, read from its files. Importing this file loads no torch; `foundation.models.checkpoint` loads the weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.artifacts.safetensors import weight_files
from foundation.core.stamps import Stamps, stamps
from foundation.labels.tasks import Task
from foundation.models.config import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from foundation.artifacts.shards import StoredWeights
    from foundation.core.target import Target
    from foundation.standalone.preprocess import Preprocessor


@dataclass(frozen=True)
class Checkpoint:
    """A model folder.

    A file is read when an attribute needs it. All objects of one folder share what was read, until a file is written anew, replaced, added
    or removed (`foundation.core.stamps.stamps`). No weight is held: `weights` knows the headers and maps a tensor on access.
    """

    folder: Path
    key: str = "checkpoint"
    """Key path of the folder, for messages."""

    @property
    def config(self) -> PreTrainedConfig:
        """A new copy of the Transformers config, which the caller may change.

        Raises:
            InputError: See `foundation.models.config.read_config`.
        """
        return read_config(self.folder, self.key)

    @property
    def is_quantized(self) -> bool:
        """Whether the folder holds the scales of a scheme."""
        from foundation.schemes.checkpoint import QUANTIZATION_JSON

        return (self.folder / QUANTIZATION_JSON).exists()

    @property
    def scheme(self) -> str | None:
        """The scheme of a quantized checkpoint; None for a float one.

        Raises:
            InputError: quantization.json is damaged or of another version.
        """
        from foundation.schemes.checkpoint import scheme_of

        return scheme_of(self.folder)

    @property
    def weights(self) -> StoredWeights:
        """Names, shapes and dtypes of all tensors; a tensor is mapped from its file on access.

        Raises:
            InputError: A file is missing or damaged, or has a tensor type that is not supported.
        """
        return _weights(self.folder, self.key, stamps(weight_files(self.folder, self.key)))

    def preprocessor(self, task: Task, max_length: int, target: Target, stride: int = 0, aggregate: str = "") -> Preprocessor:
        """Returns how rows are prepared for the model.

        Args:
            task: The task of the model.
            max_length: Maximum tokens, or samples of a waveform, per row; unused for images and spectrograms.
            target: Provides the sequence lengths to pad to.
            stride: Tokens that two windows of a long context or text share; unused where texts are truncated.
            aggregate: How window logits are pooled: mean or max; empty where texts are truncated.

        Raises:
            InputError: A file is missing or damaged, `max_length` exceeds the model's maximum, or the model needs preprocessing steps that
                are not supported.
        """
        from foundation.models.files import state_of
        from foundation.models.inputs.preprocessor import preprocessor

        return preprocessor(self.folder, task, max_length, target, (stride, aggregate), state_of(self.folder))


@lru_cache(maxsize=8)
def _weights(folder: Path, key: str, state: Stamps) -> StoredWeights:
    from foundation.artifacts.shards import StoredWeights

    del state  # part of the cache's key
    return StoredWeights(folder, key)
