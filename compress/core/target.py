"""The `target` section of a recipe: the device, the engines and the shapes that are served; and how training is divided."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from compress.core.config import Config
from compress.core.engines import DEFAULT_ENGINES, EngineName
from compress.machine.environment import physical_cores
from compress.machine.parallel import Strategy


class Target(Config):
    """Where the model is going to be served, and the shapes that count."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the engines; training uses a GPU whenever there is one."""
    engines: Annotated[tuple[EngineName, ...], Field(min_length=1)] = DEFAULT_ENGINES
    """Engines to build, in order of preference: goals are judged on the first, which is also the one served."""
    batch_sizes: Annotated[tuple[Annotated[int, Field(ge=1, le=1024)], ...], Field(min_length=1)] = (1, 8)
    """Batch sizes to measure."""
    sequence_lengths: tuple[Annotated[int, Field(ge=2, le=65536)], ...] = (32, 128)
    """Sequence lengths (tokens) to measure and to pad to; the data's max_length is always added. Ignored for images."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of every engine; the physical cores of the affinity mask where absent."""

    @property
    def num_threads(self) -> int:
        """CPU threads with the default resolved for this machine."""
        return self.threads or physical_cores()


class Parallel(Config):
    """Training by several processes, where a launcher such as torchrun started them; without one nothing changes."""

    strategy: Strategy = "ddp"
    """ddp: every process has the whole model. fsdp2: each holds a share of every weight, for models that do not fit into one GPU."""
