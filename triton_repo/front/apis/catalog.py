"""The models behind the routes: what each takes and gives, and predictions of many rows at once.

What Triton does not tell of a model, such as the names of its labels, is read from preprocess.json in the folder of its version.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from foundation.standalone.preprocess import PREPROCESS, Preprocessor
from foundation.standalone.response import LABEL, VECTOR
from triton_repo.config import TEXT, TEXT_PAIR
from triton_repo.front.bodies import strings, text_of
from triton_repo.front.inference import Inference
from triton_repo.front.limits import REQUEST_SECONDS, Rejected
from triton_repo.front.tensors import check_model, check_request
from triton_repo.front.together import together
from triton_repo.generation.served.messages import MESSAGES

PART = "preprocess"
"""The model of an ensemble that holds the preprocessor: NAME_preprocess."""
Part = str | bytes
"""One input of a row: a text, or the bytes of an image or a sound."""


@dataclass(frozen=True)
class Served:
    """A model as clients see it."""

    name: str
    description: pb.ModelMetadataResponse
    """Its description by Triton."""
    preprocessor: Preprocessor | None
    """Its preprocessor; None for a model that generates text."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of its inputs."""
        return tuple(one.name for one in self.description.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of its outputs."""
        return tuple(one.name for one in self.description.outputs)

    @property
    def generates(self) -> bool:
        """Whether it generates text."""
        return MESSAGES in self.inputs

    @property
    def embeds(self) -> bool:
        """Whether it makes vectors of texts."""
        return VECTOR in self.outputs and self.inputs == (TEXT,)

    @property
    def classifies(self) -> bool:
        """Whether it gives labels or a value, of whatever rows."""
        return LABEL in self.outputs

    @property
    def ranks(self) -> bool:
        """Whether it gives one value for a pair of texts."""
        return self.classifies and self.inputs == (TEXT, TEXT_PAIR) and len(self.known.labels) == 1

    @property
    def known(self) -> Preprocessor:
        """The preprocessor of a model that does not generate."""
        assert self.preprocessor is not None, "a language model is asked elsewhere"
        return self.preprocessor

    def tokens(self, texts: Sequence[str]) -> int:
        """Returns the number of tokens that the model reads of texts, special tokens included."""
        return sum(row.shape[1] for row in self.known.tokenized(texts))

    def overflow(self, texts: Sequence[str] | Sequence[tuple[str, ...]]) -> int | None:
        """Returns the index of the first text, or pair of texts, that is longer than the model reads; None if there is none."""
        tokenizer = self.known.tokenizer
        assert tokenizer is not None, "a model of texts"
        single = [text if isinstance(text, str) else text[0] if len(text) == 1 else text for text in texts]
        rows = tokenizer.encode_batch([self.known.prompt + text if isinstance(text, str) else text for text in single])
        return next((index for index, row in enumerate(rows) if row.overflowing), None)


@dataclass(frozen=True)
class Predictions:
    """Outputs of rows."""

    responses: Sequence[pb.ModelInferResponse]
    """Of all rows, in order; each of some of them."""

    def numbers(self, name: str) -> NDArray[np.float32]:
        """Returns an output, float32 [n, C]."""
        return np.concatenate([np.frombuffer(raw, np.float32).reshape(tensor.shape) for tensor, raw in self._of(name)])

    def texts(self, name: str) -> list[str]:
        """Returns an output of texts, one a row."""
        return [text for _, raw in self._of(name) for text in strings(raw)]

    def _of(self, name: str) -> list[tuple[pb.ModelInferResponse.InferOutputTensor, bytes]]:
        return [
            (tensor, raw)
            for response in self.responses
            for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
            if tensor.name == name
        ]


class Catalog:
    """All models.

    Args:
        channel: Channel to Triton.
        infer: Answers inferences.
        models: Names of all models of the repository.
        folder: The repository that the server reads: MODEL/VERSION/preprocess.json; empty: there is none.
    """

    def __init__(self, channel: grpc.aio.Channel, infer: Inference, models: Sequence[str], folder: str = "") -> None:
        self._stub, self._infer = service_pb2_grpc.GRPCInferenceServiceStub(channel), infer
        self._models, self._folder = models, Path(folder)
        self._served: dict[tuple[str, str], Served] = {}

    async def all(self) -> list[Served]:
        """Returns the models that clients can use by the routes; parts of other models are left out."""
        described = [await self._described(name) for name in self._models]
        return [one for one in described if one.generates or one.preprocessor is not None]

    async def named(self, name: str) -> Served:
        """Returns a model.

        Raises:
            Rejected: There is none of this name.
        """
        check_model(name, "")
        name = self._infer.name_of(name)
        if name not in self._models:
            raise Rejected(f"model {name[:64]!r}: not served here; {', '.join(self._models)} are", 404)
        return await self._described(name)

    async def only(self, fits: Callable[[Served], bool], what: str, name: str | None = None) -> Served:
        """Returns the model of a name, or the only one that fits.

        Args:
            fits: Whether a model can answer.
            what: What such a model does, for the message.
            name: Its name; None: none was given.

        Raises:
            Rejected: It does not fit, or none does, or several.
        """
        if name is not None:
            model = await self.named(name)
            if not fits(model):
                raise Rejected(f"model {model.name}: it does not {what}")
            return model
        fitting = [one for one in await self.all() if fits(one)]
        if len(fitting) != 1:
            names = ", ".join(one.name for one in fitting)
            raise Rejected(
                f"{names} {what}; name one of them as model" if fitting else f"no model here can {what}", 400 if fitting else 404
            )
        return fitting[0]

    async def predict(self, model: Served, rows: Sequence[tuple[Part, ...]], *outputs: str) -> Predictions:
        """Returns outputs of rows; they go to Triton in as few requests as its largest batch allows.

        Args:
            model: The model.
            rows: n rows, n above 0; each with one part for each input.
            outputs: Names of the outputs.

        Raises:
            Rejected: A row is not allowed, or the requests are not taken.
            grpc.aio.AioRpcError: A request failed.
        """
        most = self._infer.most_rows(model.name)
        requests = [_request(model, rows[start : start + most], outputs) for start in range(0, len(rows), most)]
        return Predictions(list(map(pb.ModelInferResponse.FromString, await together(map(self._infer, requests)))))

    async def _described(self, name: str) -> Served:
        """Returns a model; read anew when it was rolled over."""
        version = self._infer.version_of(name)
        if (name, version) not in self._served:
            served = Served(name, await self._stub.ModelMetadata(pb.ModelMetadataRequest(name=name), timeout=REQUEST_SECONDS), None)
            preprocessor = None if served.generates else self._preprocessor(name, version)
            self._served[name, version] = replace(served, preprocessor=preprocessor)
        return self._served[name, version]

    def _preprocessor(self, name: str, version: str) -> Preprocessor | None:
        """Returns the preprocessor of a model; None for a part of an ensemble, which clients do not call by these routes."""
        part = f"{name}_{PART}"
        places = [self._folder / name / version, *(self._folder / part).glob("*")]
        folder = next((place for place in places if (place / PREPROCESS).exists()), None)
        return None if folder is None or name.endswith(f"_{PART}") else Preprocessor.load(folder)


def parts(model: Served, row: Mapping[str, Part]) -> tuple[Part, ...]:
    """Returns a row of parts by name, in the order of the inputs of a model.

    Raises:
        Rejected: The model takes other parts.
    """
    if set(row) != set(model.inputs):
        raise Rejected(f"model {model.name}: {' and '.join(row)} given; it takes {' and '.join(model.inputs)}")
    return tuple(row[name] for name in model.inputs)


def _request(model: Served, rows: Sequence[tuple[Part, ...]], outputs: Sequence[str]) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model.name)
    for name, values in zip(model.inputs, zip(*rows, strict=True), strict=True):
        request.inputs.add(name=name, datatype="BYTES", shape=[len(rows), 1])
        encoded = [value if isinstance(value, bytes) else text_of(value, name).encode("utf-8") for value in values]
        request.raw_input_contents.append(b"".join(struct.pack("<I", len(value)) + value for value in encoded))
    for name in outputs:
        request.outputs.add(name=name)
    check_request(request)
    return request
