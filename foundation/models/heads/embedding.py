"""Models that turn a text into a vector: the body of a Transformer, and what sentence-transformers does to its output, in one graph.

    h_1 ... h_L = body(tokens)                    hidden states of the L tokens that are not padding, float [L, H]
    v           = pool(h)                         mean      1/L sum_t h_t
                                                  cls       h_1
                                                  last      h_L
                                                  weighted  sum_t t h_t / sum_t t
    v           = f(W v + b)                      in some models (`dense`)
    v           = v[: dimensions]                 Matryoshka: the model was trained so that the first numbers suffice
    v           = v / max(|v|, 1e-12)             if `normalize`

The settings are under the key `sentence_embedding` of config.json, which makes a checkpoint complete. They come from the files of
sentence-transformers (modules.json, 1_Pooling/config.json, 2_Normalize, config_sentence_transformers.json, sentence_bert_config.json), and
checkpoints hold these files again, so that sentence-transformers loads them. It has no module that shortens vectors before they are
normalized: the files hold a `Dense` module with the first rows of the identity instead, behind the one that the model may have itself
(`foundation.models.heads.dense`).

The pooler of BERT is left out: no vector depends on it. Padding is on the right (`foundation.models.inputs.preprocessor` checks it).

Vectors are trained and judged by their cosines. A model whose files say that dot products compare its vectors is taken where these are the
same, which is where its vectors have the length 1; other similarities are refused, unless the recipe asks for cosines.

Prompts with names, such as `query` and `document`, go from file to file, so that `encode_query` of sentence-transformers keeps its own,
and searches are measured with them (`compress.reading.judged_texts`).

An encoder-decoder of which Transformers has the encoder alone, such as T5, is loaded as that encoder (`foundation.models.library`).

Not supported: modules other than Transformer, Pooling, one Dense and Normalize; several poolings side by side, max pooling; prompts that
pooling leaves out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping
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
from foundation.models.heads.dense import LAYER, DenseSettings, activations, load_dense, read_dense, weights_file, write_dense
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
    dense: DenseSettings
    """The layer behind the pooling, where there is one."""


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
    width = settings["dense"]["outputs"] if "dense" in settings else config.hidden_size
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
    name = _subfolder(folder, "Pooling")
    return None if name is None else fetched(folder, f"{name}/config.json", path, "model.path")


def dense_files(folder: Path, path: str | None) -> list[Path]:
    """Returns the files of the module Dense in a folder of sentence-transformers: settings and weights; none where it has none."""
    name = _subfolder(folder, "Dense") if (folder / MODULES).is_file() else None
    return [] if name is None else [fetched(folder, f"{name}/config.json", path, "model.path"), weights_file(folder, name, path)]


def load_head(model: Any, folder: Path, path: str | None, missing: Collection[str]) -> set[str]:
    """Reads the weights of the layer behind the pooling from a folder of sentence-transformers; returns the names of what it read.

    Args:
        model: The model.
        folder: The folder.
        path: `model.path` of the recipe.
        missing: Weights of the model that its own files do not have.

    Raises:
        InputError: The weights are missing too, or do not fit.
    """
    names = {f"{LAYER}.{name}" for name, _ in getattr(model, LAYER).named_parameters()} if hasattr(model, LAYER) else set()
    module = _subfolder(folder, "Dense") if names & set(missing) and (folder / MODULES).is_file() else None
    if module is None:
        return set()
    load_dense(getattr(model, LAYER), weights_file(folder, module, path))
    return names


def _subfolder(folder: Path, kind: str) -> str | None:
    """Returns the subfolder of the first module of a kind in a folder of sentence-transformers; None where there is none."""
    paths = [entry.get("path") for entry in _modules(folder) if _kind(entry) == kind]
    return paths[0] if paths and isinstance(paths[0], str) else None


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
    ends: tuple[list[str], ...] = ([], [NORMALIZE], ["Dense"], ["Dense", NORMALIZE])
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ends:
        raise InputError(
            "model.path",
            f"{folder / MODULES} has the modules {', '.join(kinds) or 'none'}",
            f"Transformer, Pooling and, if wanted, one Dense and {NORMALIZE} are allowed",
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
    if (module := _subfolder(folder, "Dense")) is not None:
        settings["dense"] = read_dense(folder, module, path)
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


def write_files(model: Any, out: Path) -> None:
    """Writes the files of sentence-transformers next to a checkpoint; nothing for other models, and for shapes that it cannot load."""
    config: PreTrainedConfig = model.config
    settings = getattr(config, EMBEDDING_KEY, None)
    if not settings or getattr(config, SHAPE_KEY, None):
        return
    modules = [("", "Transformer"), (POOLING, "Pooling")]
    if "dense" in settings:
        layer, modules = getattr(model, LAYER), [*modules, (DENSE, "Dense")]
        write_dense(out / DENSE, layer.weight, layer.bias, settings["dense"]["activation"])
    if settings["dimensions"]:
        modules = [*modules, (f"{len(modules)}_Dense", "Dense")]
        write_dense(out / modules[-1][0], _first_rows(settings["dimensions"], width_of(config, whole=True)))
    if settings["normalize"]:
        modules = [*modules, (f"{len(modules)}_{NORMALIZE}", NORMALIZE)]
        (out / modules[-1][0]).mkdir(exist_ok=True)
        (out / modules[-1][0] / "README.md").write_text("Divides each vector by its length; it has no settings.\n", encoding="utf-8")
    listed = [
        {"idx": index, "name": str(index), "path": name, "type": f"sentence_transformers.models.{kind}"}
        for index, (name, kind) in enumerate(modules)
    ]
    write_json(out / MODULES, listed)
    chosen = THEIR_NAMES[settings["pooling"]][1]
    modes = {key: key == chosen for _, key in THEIR_NAMES.values()}
    (out / POOLING).mkdir(exist_ok=True)
    write_json(out / POOLING / "config.json", {"word_embedding_dimension": config.hidden_size, **modes})
    write_json(out / TRANSFORMER, {"max_seq_length": settings["max_length"], "do_lower_case": False})
    prompts = {**settings.get("prompts", {}), **({DEFAULT: settings["prompt"]} if settings["prompt"] else {})}
    told = {"prompts": prompts, "default_prompt_name": DEFAULT if settings["prompt"] else None} if prompts else {}
    write_json(out / PROMPTS, {**told, "similarity_fn_name": settings.get("similarity", COSINE)})


def _first_rows(rows: int, width: int) -> Tensor:
    """Returns the matrix that keeps the first numbers of a vector."""
    import torch

    return torch.eye(rows, width)


def width_of(config: PreTrainedConfig, whole: bool = False) -> int:
    """Returns the numbers of a vector of the model with this Transformers config, `whole` before all but the first ones are dropped."""
    settings: EmbeddingSettings = getattr(config, EMBEDDING_KEY)
    width = settings["dense"]["outputs"] if "dense" in settings else int(config.hidden_size)
    return width if whole else settings["dimensions"] or width


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
    from torch.nn import Linear, functional

    plain = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(stock.__init__).parameters else {}

    class Embedding(stock):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config, **plain)
            dense = (getattr(config, EMBEDDING_KEY, None) or {}).get("dense")
            if dense is not None:
                setattr(self, LAYER, Linear(config.hidden_size, dense["outputs"], dense["bias"]))

        def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
            from transformers.modeling_outputs import SequenceClassifierOutput

            settings = getattr(self.config, EMBEDDING_KEY)
            found = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
            vectors_BD = pooled(found.last_hidden_state.float(), attention_mask, settings["pooling"])
            if "dense" in settings:
                dense_BD = getattr(self, LAYER)(vectors_BD.to(self.dtype)).float()  # the pooling is float32 in every model
                vectors_BD = activations()[settings["dense"]["activation"]](dense_BD)
            vectors_BD = vectors_BD[:, : settings["dimensions"]]
            if settings["normalize"]:
                vectors_BD = functional.normalize(vectors_BD, dim=1, eps=SMALLEST_NORM)
            return SequenceClassifierOutput(
                logits=vectors_BD, hidden_states=getattr(found, "hidden_states", None), attentions=getattr(found, "attentions", None)
            )

    return in_place_of(stock, Embedding)
