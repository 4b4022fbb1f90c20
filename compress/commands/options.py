"""Options of a command in groups: a dataclass whose fields are options, so that no command takes twenty arguments.

    @with_options
    def bench(folder: Folder, load: LoadOptions, ...)      shows --rate, --concurrency, ... and gets them as one value

typer reads the signature of a command. `with_options` writes one in which the fields of a group replace the group.
"""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from compress.commands.arguments import TrustedCertificates
from foundation.core.speculation import DRAFT_TOKENS
from triton_repo.load.settings import Load
from triton_repo.ports import FIXED, Grpc

if TYPE_CHECKING:
    from foundation.core.decoding import Decoding
    from foundation.core.progress import ConsoleProgress


@dataclass(frozen=True)
class ServerOptions:
    """The server that `bench --server` measures, and which of its models."""

    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="Measure a running Triton server: host:port, or grpc, grpcs, http or https://..."),
    ] = None
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The model to measure; default: the only one that is ready.")
    ] = None
    protocol: Annotated[str | None, typer.Option("--protocol", help="grpc or http; default: as in the URL, else grpc.")] = None
    ca: TrustedCertificates = ""


@dataclass(frozen=True)
class PortOptions:
    """The ports of `serve`, and who answers gRPC."""

    grpc_port: Annotated[int, typer.Option("--grpc-port", min=0, max=65535, help="Port of gRPC; 0: a free one.")] = FIXED[0]
    http_port: Annotated[int, typer.Option("--http-port", min=0, max=65535, help="Port of HTTP; 0: a free one.")] = FIXED[1]
    metrics_port: Annotated[int, typer.Option("--metrics-port", min=0, max=65535, help="Port of the metrics; 0: a free one.")] = FIXED[2]
    grpc: Annotated[
        Grpc, typer.Option("--grpc", help="Who answers gRPC: front, or triton for Triton itself, on loopback and without keys.")
    ] = "front"


@dataclass(frozen=True)
class LoadOptions:
    """Load options of `bench --server`. None: the default of `Load`."""

    rate: Annotated[
        list[float] | None, typer.Option("--rate", help="Open loop: mean requests per second, Poisson arrivals. Repeatable.")
    ] = None
    concurrency: Annotated[
        list[int] | None, typer.Option("--concurrency", help="Closed loop: requests always under way. Repeatable; default: 1.")
    ] = None
    rows: Annotated[int | None, typer.Option("--rows", help=f"Rows of a request; default: {Load.rows}.")] = None
    seconds: Annotated[float | None, typer.Option("--seconds", help=f"How long each load is sent; default: {Load.seconds:g}.")] = None
    timeout_s: Annotated[float | None, typer.Option("--timeout", help=f"Most seconds for an answer; default: {Load.timeout_s:g}.")] = None
    outstanding: Annotated[
        int | None,
        typer.Option("--outstanding", help=f"Open loop: most requests under way, others are shed; default: {Load.outstanding}."),
    ] = None
    seed: Annotated[int | None, typer.Option("--seed", help=f"Seed of arrivals and order of rows; default: {Load.seed}.")] = None

    def loads(self) -> list[Load]:
        """Returns one load for each rate, or for each concurrency; one closed loop without either.

        Raises:
            InputError: A value is out of its range.
        """
        settings: dict[str, Any] = {name: value for name, value in asdict(self).items() if value is not None}
        rates, concurrencies = settings.pop("rate", []), settings.pop("concurrency", [1])
        return [Load(rate=rate, **settings) for rate in rates] or [Load(concurrency=count, **settings) for count in concurrencies]


@dataclass(frozen=True)
class RowOptions:
    """The rows that `bench --server` sends."""

    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="FILE", help="The rows: txt (a text a line), tsv, csv, json, jsonl, parquet, images, sounds; -: stdin."
        ),
    ] = None
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column", metavar="NAME", help="Column of the text, image or sound; twice for pairs. Default: text, text_pair, image, audio."
        ),
    ] = None


@dataclass(frozen=True)
class AnswerOptions:
    """Options of `generate`: variant, engine, and the source of proposed tokens."""

    variant: Annotated[
        str | None,
        typer.Option("--variant", metavar="ID", help="The variant that answers, such as quantize or quantize-int8; default: the last."),
    ] = None
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="NAME", help="The engine; default: the first that answers, else torch.")
    ] = None
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="ID", help="A second variant or engine, whose answers are printed next to the first one's."),
    ] = None
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Use the chat template of the tokenizer, if it has one.")] = True
    draft: Annotated[
        str | None, typer.Option("--draft", metavar="ID", help="A smaller variant, or the folder of a run, that proposes tokens.")
    ] = None
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", help="Tokens that the draft proposes at once.")] = DRAFT_TOKENS
    prompt_lookup: Annotated[
        int | None,
        typer.Option("--prompt-lookup", metavar="N", help="Propose the N tokens that followed the last ones earlier in the text."),
    ] = None


@dataclass(frozen=True)
class DecodingOptions:
    """How `generate` chooses tokens; the fields of `Decoding`."""

    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of an answer.")] = 64
    temperature: Annotated[float, typer.Option("--temperature", help="Above 0, tokens are drawn; 0 takes the most likely one.")] = 0.0
    top_k: Annotated[int, typer.Option("--top-k", help="Draw from the k most likely tokens; 0: from all.")] = 0
    top_p: Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens with this probability in all.")] = 1.0
    min_p: Annotated[float, typer.Option("--min-p", help="Draw from tokens with this share of the largest probability.")] = 0.0
    repetition_penalty: Annotated[float, typer.Option("--repetition-penalty", help="Above 1, tokens that occurred get less likely.")] = 1.0
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Subtracted from the logits of tokens of the answer; not in openvino_genai.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="The same, once for each occurrence; not in openvino_genai.")
    ] = 0.0
    stop: Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="A text that ends the answer. Repeatable.")] = None
    stop_tokens: Annotated[
        list[int] | None, typer.Option("--stop-token", metavar="ID", help="A token id that ends the answer. Repeatable.")
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="Seed of the drawing.")] = 0
    beams: Annotated[int, typer.Option("--beams", help="Above 1, a search with that many beams.")] = 1
    answers: Annotated[int, typer.Option("--answers", help="The best answers of the search to show, at most as many as beams.")] = 1
    length_penalty: Annotated[
        float, typer.Option("--length-penalty", help="Power of the length that the score of a beam is divided by.")
    ] = 1.0

    def decoding(self) -> "Decoding":
        """Returns the settings of one answer.

        Raises:
            InputError: A value is out of its range.
        """
        from foundation.core.decoding import Decoding

        ends = {"stop": tuple(self.stop or ()), "stop_tokens": tuple(self.stop_tokens or ())}
        return Decoding(**{**asdict(self), **ends})


@dataclass(frozen=True)
class OutputOptions:
    """What `run` prints."""

    quiet: Annotated[bool, typer.Option("--quiet", help="Print only warnings and the result.")] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events for programs, one JSON object a line, instead of lines for people.")
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", help="Show tracebacks and library messages.")] = False

    def progress(self) -> "ConsoleProgress":
        """Returns a progress for people."""
        from foundation.core.progress import ConsoleProgress

        return ConsoleProgress("quiet" if self.quiet else "verbose" if self.verbose else "normal")


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command that takes the fields of its dataclasses as options.

    Args:
        command: Has parameters whose annotation is a dataclass; each field of it is annotated as a typer option, with a default.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if not is_dataclass(parameter.annotation):
            parameters.append(parameter)
            continue
        groups[name], hints = parameter.annotation, get_type_hints(parameter.annotation, include_extras=True)
        parameters += [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
            for field in fields(parameter.annotation)
        ]

    @wraps(command)
    def parsed(**values: object) -> None:
        options = {name: group(**{field.name: values.pop(field.name) for field in fields(group)}) for name, group in groups.items()}
        command(**values, **options)

    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    parsed.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    parsed.__annotations__ = {parameter.name: parameter.annotation for parameter in named}
    return parsed
