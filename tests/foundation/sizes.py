"""The sizes of a model, given its config."""

from transformers import PreTrainedConfig

from foundation.models.architecture.shapes import on_meta
from foundation.models.architecture.structure import Sizes, Structure


def sizes_of(config: PreTrainedConfig, key: str) -> Sizes:
    """Returns the sizes of a config's model, which is built on the meta device."""
    return Structure.of(on_meta(config), key).sizes
