"""`config.pbtxt` of a language model: decoupled, without batch dimension, one process, or one on each GPU; for its inputs see
`served.request`.

The map `parameters` holds what may be changed in a deployment:

    context           most tokens of prompt and answer together; of each, for an encoder-decoder
    max_running       places: answers that run at once, with all beams of a search (1 for a decoder in stateful mode)
    max_waiting       requests that wait; a further one is refused
    request_seconds   most time for an answer, with the time that its request waits
    cache_tokens      on GPUs: tokens of all running texts that keys and values have room for; 0: what fits into the memory that is free
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tritonclient.grpc import model_config_pb2 as pb

from foundation.core.json_value import Json
from triton_repo.config import check_name
from triton_repo.generation.limits import MAX_WAITING, REQUEST_SECONDS
from triton_repo.generation.served.messages import MESSAGES, TOOLS
from triton_repo.generation.served.request import FIELDS, INPUT_IDS, JSON_SCHEMA, REGEX, STOP, STOP_TOKENS, TEXT

OUTPUTS: Mapping[str, tuple[str, int, str]] = {
    "TEXT": ("TYPE_STRING", 1, "the new piece"),
    "TOKENS": ("TYPE_INT64", -1, "its token ids; the ids of the last pieces may hold a stop text"),
    "INDEX": ("TYPE_INT32", 1, "number of the answer, 0 unless ANSWERS is above 1"),
    "LOGPROBS": ("TYPE_STRING", 1, "if asked for: JSON, the log-probability, text and bytes of each token of the text; see `logprobs.py`"),
    "FINISH_REASON": ("TYPE_STRING", 1, "in the last response: stop, length, timeout or cancelled"),
    "PROMPT_TOKENS": ("TYPE_INT32", 1, "in the last response"),
    "COMPLETION_TOKENS": ("TYPE_INT32", 1, "in the last response"),
}
"""Datatype, shape and meaning of each output."""
PROMPTS: Mapping[str, tuple[str, int, str]] = {
    TEXT: ("TYPE_STRING", 1, "prompt"),
    MESSAGES: ("TYPE_STRING", 1, 'or a conversation, JSON: [{"role": "user", "content": "..."}]'),
    TOOLS: ("TYPE_STRING", 1, "functions that the answer to a conversation may call, JSON; for a chat template that mentions tools"),
    INPUT_IDS: ("TYPE_INT64", -1, "or token ids"),
    STOP: ("TYPE_STRING", -1, "texts that end the answer; they are not part of it"),
    STOP_TOKENS: ("TYPE_INT64", -1, "token ids that end the answer, besides the model's own"),
    JSON_SCHEMA: ("TYPE_STRING", 1, "a JSON schema that the whole answer fits; not in OpenVINO GenAI"),
    REGEX: ("TYPE_STRING", 1, "or a regular expression that it matches"),
}
"""The same for each input that is not a field."""


@dataclass(frozen=True)
class LanguageSettings:
    """The settings that go into the configuration of a language model."""

    name: str
    mode: str
    """paged, stateful, batched or packed."""
    architecture: Literal["decoder", "encoder_decoder"]
    properties: Mapping[str, str]
    """Compile properties, the same as in the evaluation."""
    context: int
    vocabulary: int
    max_running: int
    special: Mapping[str, Json] = field(default_factory=dict)
    """Ids of special tokens of an encoder-decoder: `served.grouped.Special`."""
    proposals: Mapping[str, Json] = field(default_factory=dict)
    """Proposed tokens: `tokens` at once, `draft` (whether `draft/` does, else the text), its `properties`; empty: nothing does."""
    max_waiting: int = MAX_WAITING
    request_seconds: float = REQUEST_SECONDS
    on_gpus: bool = False
    """Whether a process runs on each GPU that the server sees, in place of one on the CPU."""


def language_config(settings: LanguageSettings) -> pb.ModelConfig:
    """Returns the `ModelConfig` message.

    Raises:
        InputError: The name is not a valid Triton model name.
    """
    check_name(settings.name)
    config = pb.ModelConfig(name=settings.name, backend="python", max_batch_size=0)
    config.model_transaction_policy.decoupled = True
    for name, (datatype, size, _) in PROMPTS.items():
        config.input.add(name=name, data_type=pb.DataType.Value(datatype), dims=[size], optional=True)
    for one in FIELDS:
        config.input.add(name=one.name, data_type=pb.DataType.Value(one.datatype), dims=[1], optional=True)
    for name, (datatype, size, _) in OUTPUTS.items():
        config.output.add(name=name, data_type=pb.DataType.Value(datatype), dims=[size])
    kinds = pb.ModelInstanceGroup
    config.instance_group.add(kind=kinds.KIND_GPU if settings.on_gpus else kinds.KIND_CPU, count=1)
    for name, value in parameters(settings).items():
        config.parameters[name].string_value = value
    return config


def request_seconds(config: pb.ModelConfig) -> float | None:
    """Returns the most seconds for an answer in a `ModelConfig`; None for a model that answers each request once."""
    name = "request_seconds"
    return float(config.parameters[name].string_value) if name in config.parameters else None


def parameters(settings: LanguageSettings) -> dict[str, str]:
    """Returns the `parameters` map; its values are strings, with maps as JSON."""
    return {
        "architecture": settings.architecture,
        "mode": settings.mode,
        "context": str(settings.context),
        "vocabulary": str(settings.vocabulary),
        "max_running": str(settings.max_running),
        "max_waiting": str(settings.max_waiting),
        "request_seconds": f"{settings.request_seconds:g}",
        "special": json.dumps(dict(settings.special), sort_keys=True),
        "properties": json.dumps(dict(settings.properties), sort_keys=True),
        **({"cache_tokens": "0"} if settings.on_gpus else {}),
        **({"proposals": json.dumps(dict(settings.proposals), sort_keys=True)} if settings.proposals else {}),
    }
