"""The README of a repository of language models: its models, their inputs and outputs, what the server needs, and examples."""

from __future__ import annotations

from collections.abc import Sequence

from triton_repo.generation.config import OUTPUTS, PROMPTS, LanguageSettings
from triton_repo.generation.served.request import FIELDS


def readme(models: Sequence[LanguageSettings]) -> str:
    """Returns the README of a repository whose models all run on GPUs, or all on the CPU."""
    lines = "\n".join(
        f"| `{model.name}` | {model.mode} | {model.max_running} | {model.max_waiting} | {model.request_seconds:g} | {model.context} "
        f"| {_proposing(model)} |"
        for model in models
    )
    fields = [(field.name, field.datatype, 1, f"{field.allowed} | {field.meaning}") for field in FIELDS]
    inputs = "\n".join(_row(*row) for row in [*((name, type, size, f"| {text}") for name, (type, size, text) in PROMPTS.items()), *fields])
    outputs = "\n".join(_row(name, *about) for name, about in OUTPUTS.items())
    where, about, needs = _ON_GPUS if models[0].on_gpus else _ON_CPU
    return _README.format(lines=lines, inputs=inputs, outputs=outputs, name=models[0].name, where=where, about=about, needs=needs)


def _proposing(model: LanguageSettings) -> str:
    if not model.proposals:
        return "nothing"
    return f"{'a draft' if model.proposals['draft'] else 'the text'}, {model.proposals['tokens']} at once"


def _row(name: str, datatype: str, size: int, meaning: str) -> str:
    return f"| `{name}` | {datatype.removeprefix('TYPE_').lower()} [{'n' if size < 0 else size}] | {meaning} |"


_ON_CPU = (
    "CPU",
    """\
The models stream: each request gets one response for each piece of its answer. `paged`, `batched`: the model answers several requests
at once (continuous batching). `stateful`: one request after the other, because its attention needs it; an encoder-decoder answers those
together that wait together. Each beam of a search takes the place of an answer, and the search waits until all of them fit. A request that
finds the queue full is refused, and so is a search with more beams than places.""",
    """\
The Python of the server needs `numpy` below 2, `openvino`, `openvino-genai`, `tokenizers`, `jinja2`,
for `batched` also `onnxruntime`, and `llguidance` for JSON_SCHEMA and REGEX. In a Triton container with the Python backend:

    pip install 'numpy<2' openvino openvino-genai tokenizers jinja2 onnxruntime llguidance""",
)
"""Where the models run, how they take requests, and what the server needs."""
_ON_GPUS = (
    "our own kernels on GPUs",
    """\
The models stream: each request gets one response for each piece of its answer. There is a process on each GPU that the server sees, which
answers several requests at once (continuous batching). An answer begins once there are pages for its prompt and MAX_TOKENS; requests that
come later wait for it. A request that finds the queue full is refused, and so is a search with beams.

`cache_tokens` is how many tokens of all running texts keys and values have room for. 0 takes four fifths of the memory that is free when
the model starts: give a number where several models, or two versions of one, share a GPU. A context that does not fit is an error then.""",
    """\
Kernels are compiled when the model starts; that takes a minute for the first time. Which tiles are fastest is measured then, and remembered
in `$XDG_CACHE_HOME/compress`: mount a folder there to keep it. In a Triton container with the Python backend, whose Python needs `numpy`
below 2 (`llguidance` is for JSON_SCHEMA and REGEX), and a C compiler for the launchers of kernels:

    pip install torch triton safetensors tokenizers jinja2 llguidance 'numpy<2'""",
)
"""The same for models on our kernels, which no server of ours has run on a GPU."""
_README = """\
# Language models for Triton Inference Server, {where}

| model | mode | answers at once | waiting requests | seconds for an answer | context | proposes tokens |
|---|---|---|---|---|---|---|
{lines}

{about} The numbers are `parameters` in config.pbtxt.

Inputs; one prompt is needed, all else may be left out:

| input | type | allowed | meaning |
|---|---|---|---|
{inputs}

Outputs:

| output | type | meaning |
|---|---|---|
{outputs}

To cancel an answer, close its stream. {needs}
    tritonserver --model-repository=/models --disable-auto-complete-config

With curl:

    curl -N http://127.0.0.1:8000/v2/models/{name}/generate_stream -d '{{"TEXT": "Once upon a time", "MAX_TOKENS": 40}}'

In Python:

    import queue, numpy as np, tritonclient.grpc as grpc
    answers, client = queue.Queue(), grpc.InferenceServerClient("127.0.0.1:8001")
    text, most = grpc.InferInput("TEXT", [1], "BYTES"), grpc.InferInput("MAX_TOKENS", [1], "INT32")
    text.set_data_from_numpy(np.array([b"Once upon a time"], dtype=object))
    most.set_data_from_numpy(np.array([40], dtype=np.int32))
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("{name}", [text, most])
    while True:
        result, error = answers.get()
        if error:
            raise error
        print(result.as_numpy("TEXT")[0].decode(), end="", flush=True)
        if result.as_numpy("FINISH_REASON") is not None:
            break
    client.stop_stream()
"""
