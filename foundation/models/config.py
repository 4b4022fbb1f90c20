"""The recipe's `model` section, and the checks that need only the model's config.

A Transformers config determines the possible model classes, the number of outputs, the labels of the trained head, and the maximum sequence
length. All of these are checked here, before any weight is read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from foundation.artifacts.safetensors import read_json
from foundation.core.config import Config
from foundation.core.errors import InputError, Problem, nearest
from foundation.core.files import local
from foundation.core.shown import shown
from foundation.core.stamps import Stamps, stamps
from foundation.labels.facts import Facts
from foundation.labels.spans import NO_ANSWER
from foundation.labels.tasks import TASKS, Task, tasks_with
from foundation.models.adapters import Adapter
from foundation.models.heads.embedding import EmbeddingConfig
from foundation.models.inputs.tokenizer import TrainedTokenizer, load_tokenizer
from foundation.models.library import REFUSED, depths_of, encoder_alone, one_line, quiet, takes_padding, task_classes
from foundation.models.own_shape import SHAPE_KEY, read_own, stock_type
from foundation.models.raw_config import OUTPUTS, check_labels, check_raw, without_outputs
from foundation.standalone.response import BLANK

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NO_TOKENIZER = Problem(
    "tokenizer",
    "missing",
    "text models with random weights need one",
    "give the Hub id or folder of a trained tokenizer, or {train: bpe}",
)
OWN_KEYS = {"id2label", "label2id", "num_labels", "problem_type", "architectures", "model_type", "dtype", "transformers_version"} | {
    "_name_or_path",
    *OUTPUTS,
}


class ModelConfig(Config):
    """The initial model: a trained one (`path`, or `run` and `stage`), or one with random weights (`config` and `init: random`)."""

    LATER: ClassVar[tuple[str, ...]] = ("embedding", "adapter", "run", "stage")

    path: Annotated[str, Field(min_length=1)] | None = None
    """Hub id or local folder (config.json and safetensors)."""
    run: Annotated[str, Field(min_length=1)] | None = None
    """Folder of a finished run to start from a stage of, with `stage`. The lock file of the run has the checkpoint as `path`."""
    stage: Annotated[str, Field(min_length=1)] | None = None
    """Id of that stage, such as finetune: one that makes a checkpoint in float."""
    config: dict[str, Any] | str | None = None
    """For random weights: a Transformers config, as a map (`model_type` and the sizes that differ from its defaults) or as a JSON file."""
    init: Literal["random"] | None = None
    """`random`, with `config`: initializes the weights randomly from the recipe's seed."""
    task: Task
    """Task of the model. Regression has one output and no labels; generation predicts the next token of plain text."""
    head: Literal["keep", "new"] = "keep"
    """`new` replaces the classifier with a randomly initialized one for the labels of the data; the first stage must then be `finetune`, or
    `distill` with a labeller."""
    embedding: EmbeddingConfig | None = None
    """For sentence-embedding, sentence-triplets and retrieval: how a vector is made of the tokens. Default: as the files of
    sentence-transformers in `path` say."""
    preprocessor: dict[str, Any] | None = None
    """For images: contents of preprocessor_config.json. By default the file in `path`, or a plain resize to the model's image size."""
    adapter: Adapter | None = None
    """Handling of an adapter of peft (adapter_config.json) next to the weights in `path`. `merge` adds it to them, as
    `merge_and_unload` of peft does. Absent: a folder with an adapter is refused."""
    trust_remote_code: Literal[False] = False
    """Always false: Python code that comes with a model is never run."""

    @property
    def facts(self) -> Facts:
        """What sets the task apart."""
        return TASKS[self.task]

    @property
    def is_trained(self) -> bool:
        """Whether the weights are trained, and not random."""
        return self.config is None

    @model_validator(mode="after")
    def _fits_the_answer(self) -> ModelConfig:
        if self.embedding is not None and not self.facts.embeds_texts:
            vectors = tasks_with(lambda row: row.embeds_texts)
            raise ValueError(f"embedding: given for {self.task}; it is for {vectors}: leave it out")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.run is None) != (self.stage is None):
            raise ValueError("run and stage go together: give both, or only path")
        found = None if self.run is None or self.path is None else Path(self.path)
        if found is not None and (found.parent.name != "stages" or not found.name.startswith(f"{self.stage}-")):  # not of a lock file
            raise ValueError("give either path, or run and stage")
        if (self.path is None and self.run is None) == (self.config is None):
            raise ValueError("give either path (a trained model), run and stage (of another run), or config with init: random")
        if (self.config is None) != (self.init is None):
            raise ValueError("config and init: random go together: give both, or only path")
        if self.adapter is not None and (self.path is None or self.run is not None):
            raise ValueError("adapter: given without path; it is for a trained model from elsewhere: leave it out")
        return self


def label_names(config: ModelConfig) -> tuple[str, ...] | None:
    """Returns the model's class names, or None if the data determines them (new or random head, LABEL_0, regression)."""
    from foundation.models.adapters import model_folder
    from foundation.models.heads.transcriber import vocabulary_of

    if config.path is None or config.head == "new" or not config.facts.answer.classifies:
        return None
    folder = model_folder(config.path, "model.path", config.adapter)
    if config.facts.transcribes:
        return vocabulary_of(folder, "model.path")
    written = read_json(folder / "config.json", "model.path").get("id2label", {})
    if _is_plain(written):  # the common case: avoids importing Transformers, which takes seconds; the model is checked elsewhere
        return _own(check_labels({int(index): name for index, name in written.items()}, "model.path: config.json"))
    return own_names(read_config(folder, "model.path"))


def _is_plain(id2label: object) -> bool:
    """Whether `id2label` maps "0", "1", ... to names; an empty one means generic names."""
    if not isinstance(id2label, dict) or not all(isinstance(name, str) for name in id2label.values()):
        return False
    return set(id2label) == {str(index) for index in range(len(id2label))}


def read_config(folder: Path, key: str) -> PreTrainedConfig:
    """Returns the Transformers config of a folder: an object of its own, which the caller may change.

    Raises:
        InputError: The config is missing, damaged, of an unknown type, of a quantized model, or needs custom code.
    """
    return copy.deepcopy(_config(folder, key, stamps([folder / "config.json"])))


@lru_cache(maxsize=32)
def _config(folder: Path, key: str, state: Stamps) -> PreTrainedConfig:
    del state  # part of the cache's key
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    raw = stock_type(read_json(folder / "config.json", key))
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        custom = "; it needs its own Python code, which is never run" if raw.get("auto_map") else ""
        near = nearest(kind, CONFIG_MAPPING.keys()) if isinstance(kind, str) else ""
        unknown = f"model_type {shown(kind)}, which this Transformers version does not know"
        raise InputError(key, f"{folder / 'config.json'} has {unknown}{custom}{near}")
    if raw.get("quantization_config"):
        raise InputError(
            key, f"{folder} is already quantized (quantization_config in config.json)", remedy="give the float model it was made from"
        )
    check_raw(raw, _defaults(kind), f"{key}: {folder / 'config.json'}")
    try:
        with quiet():
            own = without_outputs(raw)
            shape = raw.get(SHAPE_KEY)
            if shape or own != raw:
                found = CONFIG_MAPPING[kind].from_dict(own)
            else:
                found = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (StrictDataclassError, OSError, *REFUSED) as error:
        raise InputError(key, f"{folder / 'config.json'} is not a usable config ({one_line(error)})") from error
    if raw.get(SHAPE_KEY):
        read_own(raw[SHAPE_KEY], sum(depths_of(found) or ()), f"{key}: {folder}")
    return found


@cache
def _defaults(kind: str) -> Mapping[str, object]:
    """Returns the config that Transformers fills in for a type of model; empty if it has no default."""
    from transformers import CONFIG_MAPPING

    try:
        found: dict[str, object] = CONFIG_MAPPING[kind]().to_dict()
    except REFUSED:
        return {}
    return found


def check_task(config: ModelConfig, trained: PreTrainedConfig, num_labels: int | None) -> None:
    """Checks the type, problem type and number of outputs of a trained model (`num_labels`: labels of the data, if known).

    Raises:
        InputError: The model cannot do the task, or only with a new head.
    """
    from foundation.models.heads.towers import check_towers

    classes = task_classes(trained, config.task)
    if not classes:
        raise InputError(
            "model.path",
            f"{config.path} is a {trained.model_type}, which cannot do {config.task}",
            remedy="give a model that can, or change model.task",
        )
    _check_padding(trained, config.task, "model.path")
    if config.facts.two_towers:
        check_towers(trained, "model.path")
    if config.head == "new":
        return
    row = config.facts
    regression = not row.answer.classifies
    remedy = "give model.head: new (then finetune must be the first stage)" if not row.generates else ""
    given = (trained.architectures or classes)[0]
    if given not in classes:
        raise InputError("model.path", f"{config.path} is a {given}", f"{config.task} needs a {' or '.join(classes)}", remedy)
    if not config.facts.answer.FROM_HEAD:
        return
    if trained.problem_type not in (None, row.problem_type):
        raise InputError(
            "model.path", f"{config.path} was trained for {trained.problem_type}", f"{config.task} needs {row.problem_type}", remedy
        )
    own = config.facts.answer.LABELS
    wanted = num_labels if own is None else len(own)
    outputs = trained.vocab_size if row.transcribes else trained.num_labels
    if (wanted is not None and outputs != wanted) or (not regression and outputs < 2):
        needs = str(wanted) if regression else str(wanted or "at least 2") + (" (labels of the data)" if wanted else "")
        raise InputError("model.path", f"{config.path} has {outputs} outputs", f"{config.task} needs {needs}", remedy)


def add_embedding(trained: PreTrainedConfig, config: ModelConfig, folder: Path | None) -> PreTrainedConfig:
    """Writes the pooling settings into a Transformers config, in place, and returns it; changes nothing for tasks without vectors.

    The config of an encoder-decoder becomes the one of its encoder alone.

    Args:
        trained: The config.
        config: The recipe's model section.
        folder: Folder of the model; None for random weights.

    Raises:
        InputError: See `foundation.models.heads.embedding.resolved`.
    """
    from foundation.models.heads.embedding import EMBEDDING_KEY, resolved

    if config.facts.embeds_texts:
        if encoder_alone(trained) is not None:
            trained.is_encoder_decoder = False
        setattr(trained, EMBEDDING_KEY, resolved(config.embedding, trained, folder, config.path))
    return trained


def check_length(config: PreTrainedConfig, max_length: int) -> None:
    """Raises an `InputError` if a text model cannot read `max_length` tokens."""
    usable = most_tokens(config)
    if usable is not None and max_length > usable:
        raise InputError("data.max_length", f"{max_length} given", f"this {config.model_type} reads at most {usable} tokens")


def most_tokens(config: PreTrainedConfig) -> int | None:
    """Returns the most tokens that a text model reads; None where its positions have no limit."""
    from foundation.models.inputs.positions import first_position

    config = getattr(config, "text_config", config)  # of two towers the text tower's
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or positions < 1:  # XLNet, whose positions are relative, says -1
        return None
    return int(positions) - first_position(config)


def build_config(config: ModelConfig, tokenizer: str | TrainedTokenizer | None) -> PreTrainedConfig:
    """Returns the Transformers config of a model with random weights.

    Raises:
        InputError: A key or value is unknown, the tokenizer is missing, or the model type cannot do the task.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    from foundation.models.heads.towers import check_towers

    raw = dict(config.config) if isinstance(config.config, dict) else read_json(local(str(config.config), "model.config"), "model.config")
    kind = raw.pop("model_type", None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        near = nearest(kind, CONFIG_MAPPING.keys()) if isinstance(kind, str) else ""
        raise InputError(
            "model.config.model_type", f"{shown(kind)} given", f"a Transformers model type is allowed, for example bert or vit{near}"
        )
    try:
        default = AutoConfig.for_model(kind)
    except (StrictDataclassError, *REFUSED) as error:  # a type that is composed of other models
        raise InputError("model.config.model_type", f"{kind} cannot be built from a config alone ({one_line(error)})") from error
    allowed = (set(default.to_dict()) | set(default.attribute_map)) - OWN_KEYS
    is_file = isinstance(config.config, str)  # a complete config.json also has labels, versions, ...: we set those ourselves
    unknown = sorted(set(raw) - allowed - (OWN_KEYS if is_file else set()))
    if unknown:
        raise InputError.of(
            Problem(f"model.config.{name}", f"not a key of {kind} that can be set here{nearest(name, allowed)}") for name in unknown
        )
    values = {name: value for name, value in raw.items() if name in allowed}
    check_raw(values, _defaults(kind), "model.config")
    values = without_outputs(values)
    if config.facts.modality == "text":
        values = {**_tokenizer_values(tokenizer, values, default), **values}
    if config.facts.two_towers:
        check_towers(default, "model.config.model_type")
        own = values.get("text_config")
        texts = own if isinstance(own, Mapping) else {}
        values["text_config"] = {**_tokenizer_values(tokenizer, texts, default.text_config), **texts}
    if config.facts.encoder_decoder:
        values = {**_decoder_values(values), **values}
    try:
        built = AutoConfig.for_model(kind, **values)
    except (StrictDataclassError, *REFUSED) as error:
        raise InputError("model.config", f"not a usable {kind} ({one_line(error)})") from error
    classes = task_classes(built, config.task)
    if not classes:
        raise InputError(
            "model.config.model_type", f"a {kind} cannot do {config.task}", remedy="give a type that can, or change model.task"
        )
    _check_padding(built, config.task, "model.config")
    return built


def _check_padding(config: PreTrainedConfig, task: Task, key: str) -> None:
    """Raises an `InputError` if a text classifier mixes padding into its answers (FNet)."""
    if TASKS[task].pads_texts and not takes_padding(config, task):
        raise InputError(
            key, f"a {config.model_type} takes no attention mask, so padding would change its answers", remedy="give another model"
        )


def _tokenizer_values(
    tokenizer: str | TrainedTokenizer | None, settings: Mapping[str, object], default: PreTrainedConfig
) -> dict[str, object]:
    """Returns the vocabulary size and special token ids that a random text model takes from its tokenizer."""
    if tokenizer is None:
        raise InputError.of([NO_TOKENIZER])
    names = [name for name in ("pad_token_id", "bos_token_id", "eos_token_id") if hasattr(default, name)]
    if isinstance(tokenizer, TrainedTokenizer):
        size, ids = tokenizer.size, {name: tokenizer.ids[name] for name in names if name in tokenizer.ids}
    else:
        loaded = load_tokenizer(tokenizer)
        size, ids = len(loaded), {name: getattr(loaded, name) for name in names if getattr(loaded, name) is not None}
    wanted = settings.get("vocab_size", size)
    if isinstance(wanted, int) and wanted < size:
        raise InputError("model.config.vocab_size", f"{wanted} given", f"the tokenizer has {size} entries", f"give at least {size}")
    return {"vocab_size": size, **ids}


def _decoder_values(values: Mapping[str, object]) -> dict[str, object]:
    """Returns the token ids that the decoder of a random encoder-decoder starts and ends with: T5 starts with padding, and so do we."""
    if values.get("pad_token_id") is None or values.get("eos_token_id") is None:
        raise InputError("tokenizer", "it has no padding or no end token", "an encoder-decoder needs both", "train one with {train: bpe}")
    return {"decoder_start_token_id": values["pad_token_id"], "forced_eos_token_id": None}


def set_labels(config: PreTrainedConfig, task: Task, labels: tuple[str, ...]) -> None:
    """Sets the labels, or the names of the outputs, the problem type and the threshold of no answer of a config, in place."""
    from foundation.models.heads.reader import THRESHOLD_KEY

    facts = TASKS[task]
    if facts.embeds:
        return
    if facts.generates:
        config.use_cache = False  # our graphs have no cache; `generate` uses the setting in generation_config.json instead
        return
    if facts.finds_spans:
        known = getattr(config, THRESHOLD_KEY, None)
        setattr(config, THRESHOLD_KEY, None if NO_ANSWER not in labels else 0.0 if known is None else known)
    labels = facts.answer.LABELS or labels
    config.id2label = dict(enumerate(labels))
    config.label2id = {name: i for i, name in enumerate(labels)}
    config.problem_type = facts.problem_type
    if facts.transcribes:  # the sizes of the head; Transformers calls the blank padding
        config.vocab_size, config.pad_token_id = len(labels), labels.index(BLANK) if BLANK in labels else 0


def label_list(config: PreTrainedConfig) -> tuple[str, ...]:
    """Returns the label names of a config, ordered by class id.

    Raises:
        InputError: The names cannot name classes.
    """
    return check_labels(config.id2label, "model: config.json")


def own_names(config: PreTrainedConfig) -> tuple[str, ...] | None:
    """Returns the label names of a config, or None if they are the generic LABEL_0, LABEL_1, ..."""
    return _own(label_list(config))


def _own(names: tuple[str, ...]) -> tuple[str, ...] | None:
    return None if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else names


def num_experts(config: PreTrainedConfig) -> int:
    """Returns the experts of a layer of a mixture; 0 for other models."""
    known = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    return int(next((count for count in known if count), 0))
