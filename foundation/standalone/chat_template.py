"""Conversations to text, as Transformers 5.x renders them. Needs only Jinja2; it is copied to servers.

A chat template is a Jinja program that comes with a model. Two programs that read the same template differ in small settings, and every one
of them changes prompts: whether a line with only a tag leaves a line feed, how text is escaped in JSON, which names a template can call.
This file has the settings of `apply_chat_template` of Transformers:

    sandbox      immutable, so that a template cannot change what it is given, nor reach Python
    blocks       trim_blocks and lstrip_blocks
    tags         break and continue; generation, which marks what a model is trained on and is rendered as it is
    filters      tojson writes letters outside ASCII and HTML as they are
    names        raise_exception(message), strftime_now(format), dict and namespace
    variables    messages, add_generation_prompt, tools or None, the named special tokens; documents is None

Left out: documents, continuation of the last message, reasoning next to the content of a message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = Mapping[str, Any]
"""A message: role, content, and what a template reads besides, such as tool_calls."""
Tool = Mapping[str, Any]
"""A function that a model may call: {"type": "function", "function": {"name", "description", "parameters"}}."""


class Render(Protocol):
    """Renders conversations."""

    def __call__(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Tool] = ()) -> str:
        """Returns a conversation as text; raises `TemplateRefused` where the template refuses it or fails."""


class TemplateRefused(ValueError):
    """A template that takes no such messages, or none at all; a one-line message."""


def compiled(template: str, special_tokens: Mapping[str, str]) -> Render:
    """Returns the function that renders conversations.

    Args:
        template: The Jinja program.
        special_tokens: Named special tokens of the tokenizer, such as bos_token.

    Raises:
        TemplateRefused: The template is not valid Jinja. The returned function raises it where the template refuses the messages or fails.
    """
    try:
        program = _environment().from_string(template)
    except Exception as error:  # a template is a program of others: whatever it raises is its refusal
        raise TemplateRefused(_line(error)) from error

    def render(messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Tool] = ()) -> str:
        if not messages:
            raise TemplateRefused("there is no message")
        copied = [{name: value for name, value in message.items() if value is not None} for message in messages]
        given = {"messages": copied, "tools": list(tools) or None, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            return program.render(**given, **special_tokens)
        except Exception as error:  # as above
            raise TemplateRefused(_line(error)) from error

    return render


def names_tools(template: str) -> bool:
    """Whether a template reads `tools`; False for one that is not valid Jinja."""
    try:
        program = _environment().parse(template)
    except jinja2.TemplateError:
        return False
    return any(one.name == "tools" and one.ctx == "load" for one in program.find_all(jinja2.nodes.Name))


def _line(error: Exception) -> str:
    """Returns the error message of a template in one line, after the error's name unless the template raised it on purpose."""
    said = " ".join(str(error).split())[:300]
    return said if type(error) is jinja2.TemplateError and said else f"{type(error).__name__}: {said}".removesuffix(": ")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class _Generation(Extension):
    """Renders the part between `generation` and `endgeneration`, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it

    def parse(self, parser: Any) -> Any:
        """Returns the node of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` of a template, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Returns a map with the same value for every key."""
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace` of a template: attributes that begin with an underscore are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=...)` is allowed
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name}: an attribute of a namespace cannot begin with an underscore")


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: Any) -> NoReturn:
    raise jinja2.TemplateError(message)
