"""`config.pbtxt` of a model that runs on the CPU, written through Triton's own protobuf.

    TEXT | TEXT, TEXT_PAIR | QUESTION, CONTEXT     STRING [1]    UTF-8 text
    IMAGE | AUDIO                                  STRING [1]    the bytes of a PNG, JPEG, WAV or FLAC file

For the outputs see `foundation.standalone.response`.

`settings.json` in the folder of a version holds what the model itself reads (mode, compile properties, batch sizes): two versions that are
loaded at once share `config.pbtxt`, and may differ in that. Before Triton reports a model ready, it runs the warm-up requests: one row for
each bucket, from files in `warmup/`. The limits of the queue come from `triton_repo.queueing`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from foundation.core.errors import InputError
from foundation.standalone.adapted import adapter_of
from foundation.standalone.preprocess import Row
from foundation.standalone.response import FP32, RESPONSES, STRING, TIER
from foundation.standalone.sound import is_sound
from foundation.standalone.windows import Window
from triton_repo.queueing import Queue, write_policy

TEXT, TEXT_PAIR, QUESTION, CONTEXT, IMAGE, AUDIO = "TEXT", "TEXT_PAIR", "QUESTION", "CONTEXT", "IMAGE", "AUDIO"
ADAPTER = "ADAPTER"
"""The input that names the adapter of a row."""
TYPES = {STRING: pb.TYPE_STRING, FP32: pb.TYPE_FP32}
MIN_BATCH = 8
"""Lower bound of max_batch_size, so that the dynamic batcher can merge requests."""
SETTINGS = "settings.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class Scheduling:
    """How requests come to a model."""

    instances: int = 1
    """Number of parallel processes of the model."""
    max_queue_delay_us: int = 0
    """Maximum time in microseconds that a request waits for others to form a batch."""
    queue: Queue = field(default_factory=Queue)
    """Limits of the queue."""
    threads: int | None = None
    """CPU threads of each process; None: as many as the evaluated engine."""


@dataclass(frozen=True)
class ModelSettings:
    """The settings that go into a model configuration."""

    name: str
    modality: Literal["text", "image", "audio"]
    pairs: bool
    """Whether rows are pairs of texts."""
    width: int
    """Numbers of an answer: its logits, or the dimensions of its vector."""
    engine: str
    """Name of the engine, a row of `foundation.core.engines`."""
    max_batch_size: int
    """Maximum number of rows in one request and in merged requests."""
    batch_sizes: tuple[int, ...]
    """Batch sizes that the model compiles, ascending, 1 first."""
    mode: str
    """static, dynamic or packed."""
    properties: Mapping[str, str]
    """Settings of the engine, the same as in the evaluation."""
    warm_up: tuple[str, ...] = ()
    """Names of the warm-up samples; `warmup/<name>.<input>` holds the serialized row."""
    scheduling: Scheduling = Scheduling()
    """How requests come to the model."""
    response: str = "label"
    """Form of its answers, a name in `foundation.standalone.response.RESPONSES`."""
    is_cascade: bool = False
    """Whether answers name the tier that gave them."""
    adapters: tuple[str, ...] = ()
    """Names of its adapters, one of which each row names; else empty."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""
        files = {"image": IMAGE, "audio": AUDIO}
        if self.modality in files:
            return (files[self.modality],)
        if self.response == "span":
            return (QUESTION, CONTEXT)
        return ((TEXT, TEXT_PAIR) if self.pairs else (TEXT,)) + ((ADAPTER,) if self.adapters else ())


def inputs_of(row: Row) -> tuple[str, ...]:
    """Returns the names of the inputs that a row is sent as."""
    if isinstance(row, bytes):
        return (AUDIO,) if is_sound(row) else (IMAGE,)
    if isinstance(row, Window):
        return (QUESTION, CONTEXT)
    texts = (TEXT, TEXT_PAIR) if isinstance(row, tuple) else (TEXT,)
    return texts if adapter_of(row) is None else (*texts, ADAPTER)


def model_config(settings: ModelSettings) -> pb.ModelConfig:
    """Returns the `ModelConfig` message.

    Raises:
        InputError: The name is not a valid Triton model name.
    """
    check_name(settings.name)
    config = pb.ModelConfig(name=settings.name, backend="python", max_batch_size=settings.max_batch_size)
    for name in settings.inputs:  # a request without an adapter gets the model's own error, which names them
        config.input.add(name=name, data_type=pb.TYPE_STRING, dims=[1], optional=name == ADAPTER)
    for output in RESPONSES[settings.response].outputs(settings.width):
        config.output.add(name=output.name, data_type=TYPES[output.kind], dims=output.dims)
    if settings.is_cascade:
        config.output.add(name=TIER, data_type=pb.TYPE_INT32, dims=[1])
    config.dynamic_batching.max_queue_delay_microseconds = settings.scheduling.max_queue_delay_us
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=settings.scheduling.instances)
    write_policy(config, settings.scheduling.queue)
    for sample in settings.warm_up:
        _add_warm_up(config, sample, settings.inputs)
    return config


def check_name(name: str) -> None:
    """Raises an `InputError` if Triton takes no model of this name."""
    if not _NAME.fullmatch(name):
        raise InputError(
            "model name", f"{name!r} given", remedy="use at most 128 letters, digits, '.', '_' and '-', with a letter or digit first"
        )


def model_names(repository: Path) -> list[str]:
    """Returns the names of the models of a repository, sorted."""
    return sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))


def version_settings(settings: ModelSettings) -> str:
    """Returns the contents of `settings.json`."""
    values = {
        "engine": settings.engine,
        "mode": settings.mode,
        "batch_sizes": list(settings.batch_sizes),
        "properties": dict(settings.properties),
    }
    return json.dumps(values, indent=1, sort_keys=True) + "\n"


def to_text(config: pb.ModelConfig) -> str:
    """Returns the contents of config.pbtxt."""
    text: str = text_format.MessageToString(config)
    return text


def from_text(text: str) -> pb.ModelConfig:
    """Parses the output of `to_text`."""
    return text_format.Parse(text, pb.ModelConfig())


def serialized(values: Sequence[bytes]) -> bytes:
    """Returns strings in Triton's file format: each preceded by its length as 4 little-endian bytes."""
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def _add_warm_up(config: pb.ModelConfig, sample: str, inputs: Sequence[str]) -> None:
    warm_up = config.model_warmup.add(name=sample, batch_size=1)
    for name in inputs:
        value = warm_up.inputs[name]
        value.data_type = pb.TYPE_STRING
        value.dims.append(1)
        value.input_data_file = f"{sample}.{name}"
