"""Models that turn a text into a vector: the body of a Transformer, and what sentence-transformers does to its output, in one graph.

    h_1 ... h_L = body(tokens)                    hidden states of the L tokens that are not padding, float [L, H]
    v           = pool(h)                         mean      1/L sum_t h_t
                                                  cls       h_1
                                                  last      h_L
                                                  weighted  sum_t t h_t / sum_t t
    v           = v[: dimensions]                 Matryoshka: the model was trained so that the first numbers suffice
    v           = v / max(|v|, 1e-12)             if `normalize`

The settings are under the key `sentence_embedding` of config.json, which makes a checkpoint complete. They come from the files of
sentence-transformers (modules.json, 1_Pooling/config.json, 2_Normalize, config_sentence_transformers.json, sentence_bert_config.json), and
checkpoints hold these files again, so that sentence-transformers loads them. It has no module that shortens vectors before they are
normalized: the files hold a `Dense` module with the first rows of the identity instead.

The pooler of BERT is left out: no vector depends on it. Padding is on the right (`foundation.models.inputs.preprocessor` checks it).

Vectors are trained and judged by their cosines. A model whose files say that dot products compare its vectors is taken where these are the
same, which is where its vectors have the length 1; other similarities are refused, unless the recipe asks for cosines.

Prompts with names, such as `query` and `document`, go from file to file, so that `encode_query` of sentence-transformers keeps its own,
and searches are measured with them (`compress.reading.judged_texts`).

Not supported: modules other than Transformer, Pooling and Normalize; several poolings side by side, max pooling; prompts that pooling
leaves out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args

from pydantic import Field

from foundation.artifacts.artifact import write_json
from foundation.artifacts.safetensors import MOST_JSON, parse_json, read_json
from foundation.core.config import Config
from foundation.core.errors import InputError
from foundation.core.files import read_plain
from foundation.core.named import one_of
from foundation.core.shown import reason, shown
from foundation.models.files import fetched
from foundation.models.library import in_place_of
from foundation.models.own_shape import SHAPE_KEY

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

EMBEDDING_KEY = "sentence_embedding"
MODULES, TRANSFORMER, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING, DENSE, NORMALIZE = "1_Pooling", "2_Dense", "Normalize"
DEFAULT = "default"
"""Name of the default prompt in the files that are written."""
QUERY_NAMES, DOCUMENT_NAMES = ("query",), ("document", "passage", "corpus")
"""Names of prompts that `encode_query` and `encode_document` of sentence-transformers look for, the first one found."""
SMALLEST_NORM = 1e-12
COSINE, DOT = "cosine", "dot"
SIMILARITIES = (COSINE, DOT, "euclidean", "manhattan")
"""Similarity function of sentence-transformers."""
Pooling = Literal["mean", "cls", "last", "weighted"]
THEIR_NAMES: dict[Pooling, tuple[str, str]] = {
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "cls": ("cls", "pooling_mode_cls_token"),
    "last": ("lasttoken", "pooling_mode_lasttoken"),
    "weighted": ("weightedmean", "pooling_mode_weightedmean_tokens"),
}
"""Names of a pooling in sentence-transformers: the value of `pooling_mode`, and the older separate key."""


class EmbeddingConfig(Config):
    """How a vector is made of the hidden states of a text. What is not given comes from the files of sentence-transformers in the model's
    folder."""

    pooling: Pooling | None = None
    """mean: mean over the tokens; cls: the first token; last: the last token; weighted: mean with weights 1, 2, 3, ..."""
    normalize: bool | None = None
    """Whether vectors get the length 1. Default: as the files say; without files true."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Keeps the first numbers of each vector, before it is normalized; for models that were trained for it (Matryoshka). Default: all."""
    similarity: Literal["cosine", "dot"] | None = None
    """Similarity of vectors: the cosine, or the dot product of vectors of length 1, which equals the cosine. Default: as the
    files say; without files cosine."""
    prompt: str | None = None
    """Text that is put before each text. Default: the default prompt of the files, if any."""


class EmbeddingSettings(TypedDict, total=False):
    """Settings of a model in its config, below `EMBEDDING_KEY`."""

    pooling: str | None
    normalize: bool
    dimensions: int | None
    """Numbers of a vector; None: all."""
    prompt: str
    """Text that is put before each text."""
    max_length: int | None
    """None: unknown."""
    prompts: dict[str, str]
    """Other prompts, where some have names."""
    similarity: str
    """What vectors are compared by, where it is not the cosine."""


def resolved(requested: EmbeddingConfig | None, config: PreTrainedConfig, folder: Path | None, path: str | None) -> EmbeddingSettings:
    """Returns the settings of a model, complete.

    Args:
        requested: What the recipe says.
        config: The Transformers config of the model.
        folder: Its folder; None for random weights.
        path: `model.path` of the recipe.

    Raises:
        InputError: Nothing says how tokens are pooled, the files need what is not supported, `dimensions` exceeds the width, or vectors
            are not compared by cosine.
    """
    own = getattr(config, EMBEDDING_KEY, None)
    found = own or (_read(folder, path) if folder is not None and (folder / MODULES).is_file() else {})
    usual = EmbeddingSettings(pooling=None, normalize=True, dimensions=None, prompt="", max_length=None)
    said = requested.model_dump(exclude_none=True) if requested is not None else {}
    settings: EmbeddingSettings = {**usual, **found, **said}  # type: ignore[typeddict-item]
    if settings["pooling"] not in get_args(Pooling):
        key, missing = ("model.path", f"{path} has no {MODULES}") if folder is not None else ("model.embedding", "pooling missing")
        missing = f"{missing}, so that nothing says how a vector is made of the tokens"
        raise InputError(key, missing, remedy="give model.embedding: {pooling: mean}")
    width = config.hidden_size
    if settings["dimensions"] is not None and settings["dimensions"] > width:
        raise InputError("model.embedding.dimensions", f"{settings['dimensions']} given", f"the vectors of this model have {width} numbers")
    similarity = settings.pop("similarity", COSINE)
    _check_similarity(similarity, settings["normalize"])
    return settings if similarity == COSINE else {**settings, "similarity": similarity}


def _check_similarity(similarity: str, normalized: bool) -> None:
    """Raises if vectors are compared by something else than their cosine."""
    if similarity == COSINE or (similarity == DOT and normalized):
        return
    given = f"its vectors are compared by {similarity} (similarity_fn_name of {PROMPTS}), and are judged by cosine here"
    same = "model.embedding: {normalize: true}, which makes both the same, or " if similarity == DOT else ""
    raise InputError("model.path", given, remedy=f"give {same}model.embedding: {{similarity: {COSINE}}} if cosines are what you want")


def pooling_file(folder: Path, path: str | None) -> Path | None:
    """Returns the file with the settings of the pooling in a folder of sentence-transformers; None where there is none."""
    if not (folder / MODULES).is_file():
        return None
    for entry in _modules(folder):
        if _kind(entry) == "Pooling" and isinstance(entry.get("path"), str):
            return fetched(folder, f"{entry['path']}/config.json", path, "model.path")
    return None


def _modules(folder: Path) -> list[dict[str, object]]:
    file = folder / MODULES
    try:
        modules = parse_json(read_plain(file, MOST_JSON, f"model.path: {file}"))
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            "model.path", f"{file} cannot be read as JSON ({reason(error)})", remedy="copy the whole folder of the model"
        ) from error
    if not isinstance(modules, list) or not all(isinstance(entry, dict) for entry in modules):
        raise InputError("model.path", f"{file} holds no list of modules", remedy="copy the whole folder of the model")
    return modules


def _kind(entry: Mapping[str, object]) -> str:
    return str(entry.get("type", "")).rpartition(".")[2]


def _read(folder: Path, path: str | None) -> EmbeddingSettings:
    """Returns the settings in the files of sentence-transformers."""
    kinds = [_kind(entry) for entry in _modules(folder)]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", NORMALIZE]):
        raise InputError(
            "model.path",
            f"{folder / MODULES} has the modules {', '.join(kinds) or 'none'}",
            f"Transformer, Pooling and, if wanted, {NORMALIZE} are allowed",
            "give another model",
        )
    file = pooling_file(folder, path)
    if file is None or not file.is_file():
        raise InputError("model.path", f"{folder} has no config.json of its Pooling module", remedy="copy the whole folder of the model")
    prompt, named, similarity = _prompt(folder), named_prompts(folder), _similarity(folder)
    settings = EmbeddingSettings(
        pooling=_pooling(file, prompt), normalize=kinds[-1] == NORMALIZE, prompt=prompt, max_length=_max_length(folder)
    )
    if named:
        settings["prompts"] = named
    if similarity != COSINE:
        settings["similarity"] = similarity
    return settings


def _similarity(folder: Path) -> str:
    """Returns the similarity of vectors that the files of a model name."""
    said = read_json(folder / PROMPTS, "model.path").get("similarity_fn_name") if (folder / PROMPTS).is_file() else None
    if said is not None and said not in SIMILARITIES:
        raise InputError("model.path", f"{folder / PROMPTS} has the similarity_fn_name {shown(said)}", f"{one_of(SIMILARITIES)} is allowed")
    return said or COSINE


def _pooling(file: Path, prompt: str) -> str:
    said: Any = read_json(file, "model.path")
    modes = said.get("pooling_mode") if isinstance(said, dict) else None
    if modes is None and isinstance(said, dict):
        modes = [key for key, value in said.items() if key.startswith("pooling_mode_") and value]
    modes = [modes] if isinstance(modes, str) else modes
    names = {name: ours for ours, theirs in THEIR_NAMES.items() for name in theirs}
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in names:
        allowed = ", ".join(name for name, _ in THEIR_NAMES.values())
        raise InputError("model.path", f"{file} has the pooling {shown(modes)}", f"one of {allowed} is allowed")
    if prompt:
        _check_included(file, prompt)
    return names[modes[0]]


def _check_included(file: Path, prompt: str) -> None:
    if read_json(file, "model.path").get("include_prompt", True) is not True:
        raise InputError(
            "model.path",
            f"{file} leaves the prompt {shown(prompt)} out of the pooling, which is not supported",
            remedy="give another model",
        )


def named_prompts(folder: Path) -> dict[str, str]:
    """Returns the prompts by name that the files of a model have, without the default one and empty ones."""
    prompts, default = _prompts(folder)
    return {name: text for name, text in prompts.items() if name != default and text}


def search_prompts(folder: Path) -> tuple[str, str]:
    """Returns the prompts of a sentence-transformers model for queries and for documents; '' where it has no name for them.

    If there is a default prompt, each text already begins with it, and these are ''.

    Raises:
        InputError: The files cannot be read, or leave a prompt out of the pooling.
    """
    prompts, default = _prompts(folder)
    if default is not None:
        return "", ""
    query, document = (next((prompts[name] for name in names if name in prompts), "") for names in (QUERY_NAMES, DOCUMENT_NAMES))
    file = pooling_file(folder, str(folder))
    if (query or document) and file is not None and file.is_file():
        _check_included(file, query or document)
    return query, document


def _prompt(folder: Path) -> str:
    """Returns the default prompt."""
    prompts, default = _prompts(folder)
    return "" if default is None else prompts[default]


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Returns the prompts of the files by name, and the name of the default one."""
    if not (folder / PROMPTS).is_file():
        return {}, None
    said = read_json(folder / PROMPTS, "model.path")
    default, named = said.get("default_prompt_name"), said.get("prompts")
    prompts = named if named else {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise InputError("model.path", f"{folder / PROMPTS} has the prompts {shown(prompts)}", "names with texts are allowed")
    if default is not None and default not in prompts:
        raise InputError("model.path", f"{folder / PROMPTS} has the default prompt {shown(default)}, which is none of its prompts")
    return prompts, default


def _max_length(folder: Path) -> int | None:
    length = read_json(folder / TRANSFORMER, "model.path").get("max_seq_length") if (folder / TRANSFORMER).is_file() else None
    return length if isinstance(length, int) else None


def write_files(config: PreTrainedConfig, out: Path) -> None:
    """Writes the files of sentence-transformers next to a checkpoint; nothing for other models, and for shapes that it cannot load."""
    settings = getattr(config, EMBEDDING_KEY, None)
    if not settings or getattr(config, SHAPE_KEY, None):
        return
    width, dimensions = config.hidden_size, settings["dimensions"]
    names = ["", POOLING, *([DENSE] if dimensions else []), *([f"{2 + bool(dimensions)}_{NORMALIZE}"] if settings["normalize"] else [])]
    kinds = ["Transformer", "Pooling", *(["Dense"] if dimensions else []), NORMALIZE][: len(names)]
    modules = [
        {"idx": index, "name": str(index), "path": name, "type": f"sentence_transformers.models.{kind}"}
        for index, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]
    for name in names[1:]:
        (out / name).mkdir(exist_ok=True)
    chosen = THEIR_NAMES[settings["pooling"]][1]
    write_json(out / MODULES, modules)
    modes = {key: key == chosen for _, key in THEIR_NAMES.values()}
    write_json(out / POOLING / "config.json", {"word_embedding_dimension": width, **modes})
    write_json(out / TRANSFORMER, {"max_seq_length": settings["max_length"], "do_lower_case": False})
    prompts = {**settings.get("prompts", {}), **({DEFAULT: settings["prompt"]} if settings["prompt"] else {})}
    told = {"prompts": prompts, "default_prompt_name": DEFAULT if settings["prompt"] else None} if prompts else {}
    write_json(out / PROMPTS, {**told, "similarity_fn_name": settings.get("similarity", COSINE)})
    if settings["normalize"]:
        (out / names[-1] / "README.md").write_text("Divides each vector by its length; it has no settings.\n", encoding="utf-8")
    if dimensions:
        _write_dense(out / DENSE, width, dimensions)


def _write_dense(folder: Path, width: int, dimensions: int) -> None:
    """Writes a `Dense` module that keeps the first numbers of a vector."""
    import torch
    from safetensors.torch import save_file

    settings = {"in_features": width, "out_features": dimensions, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    write_json(folder / "config.json", settings)
    save_file({"linear.weight": torch.eye(dimensions, width)}, folder / "model.safetensors", metadata={"format": "pt"})


def width_of(config: PreTrainedConfig) -> int:
    """Returns the numbers of a vector of the model with this Transformers config."""
    return int(getattr(config, EMBEDDING_KEY)["dimensions"] or config.hidden_size)


def pooled(hidden_BSH: Tensor, mask: Tensor | None, pooling: Pooling) -> Tensor:
    """Returns one vector for each text, float `[B, H]`.

    Args:
        hidden_BSH: Hidden states of the tokens.
        mask: 1 for tokens and 0 for padding, int `[B, S]`; or what is added to scores, float `[B, 1, Q, S]`; None: there is no padding.
        pooling: How.
    """
    import torch

    if pooling == "cls":
        return hidden_BSH[:, 0]
    if mask is None:
        real_BS = torch.ones_like(hidden_BSH[..., 0])
    else:
        real_BS = ((mask[:, 0, -1] >= 0) if mask.ndim == 4 else mask).to(hidden_BSH.dtype)
    weight_BS = real_BS
    if pooling != "mean":
        place_BS = real_BS.cumsum(dim=1)
        weight_BS = real_BS * (place_BS if pooling == "weighted" else (place_BS == real_BS.sum(dim=1, keepdim=True)))
    return (hidden_BSH * weight_BS[..., None]).sum(dim=1) / weight_BS.sum(dim=1, keepdim=True).clamp(min=1e-9)


@functools.cache
def embedding_class(stock: Any) -> Any:
    """Returns a subclass of a body, such as BertModel, whose `logits` are the vectors of the texts; it keeps the stock name and weights.

    It has to be a class because Transformers calls the constructor itself when it loads weights.
    """
    from torch.nn import functional

    plain = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(stock.__init__).parameters else {}

    class Embedding(stock):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config, **plain)

        def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
            from transformers.modeling_outputs import SequenceClassifierOutput

            settings = getattr(self.config, EMBEDDING_KEY)
            found = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
            vectors_BD = pooled(found.last_hidden_state.float(), attention_mask, settings["pooling"])[:, : settings["dimensions"]]
            if settings["normalize"]:
                vectors_BD = functional.normalize(vectors_BD, dim=1, eps=SMALLEST_NORM)
            return SequenceClassifierOutput(
                logits=vectors_BD, hidden_states=getattr(found, "hidden_states", None), attentions=getattr(found, "attentions", None)
            )

    return in_place_of(stock, Embedding)
