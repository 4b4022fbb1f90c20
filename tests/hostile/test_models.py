"""Model folders, configs and tokenizers that cannot be right: each is refused in one line that names the thing."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.models.config import ModelConfig
from foundation.models.folder import Checkpoint
from foundation.models.importing import check_model, import_model
from tests.hostile.lines import one_line

LABELS = ("negative", "positive")
NAN, INF = float("nan"), float("inf")


def model(folder: Path | str, **changes: Any) -> ModelConfig:
    return ModelConfig(**{"path": str(folder), "task": "text-classification", **changes})


@pytest.fixture
def folder(tiny_bert: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bert, tmp_path / "source"))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


CONFIGS: list[tuple[str, Any]] = [
    *(("layer_norm_eps", value) for value in (NAN, INF, -1e-12, 0, 2, "x", {"__float__": "NaN"}, {"__float__": "x"})),
    *(("hidden_dropout_prob", value) for value in (NAN, -0.1, 1.0, 7)),
    *(("attention_probs_dropout_prob", value) for value in (NAN, -INF, 1.5)),
    *(("initializer_range", value) for value in (NAN, INF, -1.0)),
    *(("num_hidden_layers", value) for value in (0, -1, 1001, 10**9, 10**30, 2.5, "2", None, [2])),
    *(("hidden_size", value) for value in (0, -32, 33, 10**9, 10**300, "x", NAN)),
    *(("num_attention_heads", value) for value in (0, -4, 5, 10**9, "x")),
    *(("intermediate_size", value) for value in (0, -1, 10**12, 10**17, "x")),
    *(("vocab_size", value) for value in (0, -1, 10**12, 10**17, "x", NAN)),
    *(("max_position_embeddings", value) for value in (0, -5, 10**9, "x", 4.5)),
    *(("type_vocab_size", value) for value in (10**12, 10**17, "x")),
    ("hidden_act", "no-such"),
    ("hidden_act", 7),
    ("anything", NAN),
    ("anything", [1.0, [INF]]),
    ("anything", {"inner": {"rope_theta": -1.0}}),
    ("anything", 10**20),
    ("num_labels", 10**9),
    ("_attn_implementation", "kernels-community/flash-attn"),
    ("attn_implementation", "kernels-community/flash-attn3:main"),
    ("_attn_implementation_internal", "owner/kernel"),
    ("attn_implementation", {"text_config": "owner/kernel"}),
    ("anything", {"attn_implementation": "owner/kernel"}),
    ("_attn_implementation", "flash_attention_2"),
    ("_attn_implementation", ["sdpa"]),
    ("experts_implementation", "owner/kernel"),
    ("id2label", {"0": "same", "1": "same"}),
    ("id2label", {"0": "same", "1": " same "}),
    ("id2label", {"0": "a", "5": "b"}),
    ("id2label", {"0": "a", "1": ""}),
    ("id2label", {"0": "a", "1": None}),
    ("id2label", {"0": "a", "1": 3}),
    ("id2label", {"0": "a", "1": "b\nc"}),
    ("id2label", {"zero": "a", "one": "b"}),
    ("id2label", ["a", "b"]),
    ("id2label", "ab"),
    ("id2label", 7),
    ("label2id", 7),
    ("architectures", 7),
    ("architectures", "BertModel"),
    ("architectures", [7]),
    ("architectures", ["NoSuchModel"]),
    ("model_type", "x" * 5000),
    ("model_type", None),
    ("model_type", ["bert"]),
    ("model_type", "encoder-decoder"),
    ("quantization_config", {"bits": 4}),
    ("problem_type", "no-such"),
    ("problem_type", 3),
    ("dtype", "no-such"),
    ("dtype", 3),
    ("compress_architecture", {"model_type": "bert"}),
    ("compress_architecture", {"model_type": 7}),
    ("pad_token_id", "x"),
    ("pad_token_id", 10**9),
]


@pytest.mark.parametrize(("name", "value"), CONFIGS, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CONFIGS)])
def test_a_config_that_cannot_be_right(name: str, value: Any, folder: Path) -> None:
    edit(folder / "config.json", **{name: value})
    with pytest.raises(InputError) as caught:
        _label_names_and_check(model(folder))
    one_line(caught.value, "model", *([name] if name in ("layer_norm_eps", "id2label", "num_hidden_layers") else []))


def _label_names_and_check(config: ModelConfig) -> None:
    """What a run does with a model before its first stage."""
    from foundation.models.config import label_names
    from foundation.models.size import count

    label_names(config)
    checked = check_model(config, 2, 16)
    count(checked.config, config.task, 16)
    import_model(config, LABELS, 0, Path(str(config.path)).parent / "nowhere")


def test_the_names_do_not_matter_to_a_new_head(folder: Path) -> None:
    edit(folder / "config.json", id2label={"0": "same", "1": "same"}, label2id={"same": 0})
    check_model(model(folder, head="new"), 2, 16)


def test_what_transformers_writes_by_default_is_allowed() -> None:
    from transformers import CONFIG_MAPPING

    from foundation.models.raw_config import check_raw

    refused = {}
    for kind in (
        "bert",
        "roberta",
        "distilbert",
        "gpt2",
        "llama",
        "qwen3_moe",
        "vit",
        "convnext",
        "swin",
        "deberta-v2",
        "mamba2",
        "mixtral",
    ):
        try:
            check_raw(CONFIG_MAPPING[kind]().to_dict(), {}, kind)
        except InputError as error:
            refused[kind] = error.lines
    assert refused.keys() <= {"mamba2"}  # its time_step_limit is infinite
    default = CONFIG_MAPPING["mamba2"]().to_dict()
    check_raw(default, default, "mamba2")
    written = json.loads(CONFIG_MAPPING["mamba2"]().to_json_string(use_diff=False))
    assert {"__float__": "Infinity"} in written["time_step_limit"]
    check_raw(written, default, "mamba2")


RANDOM: list[tuple[str, dict[str, Any]]] = [
    ("no type", {}),
    ("unknown type", {"model_type": "brt"}),
    ("a type of a wrong type", {"model_type": 7}),
    ("a composed type", {"model_type": "encoder-decoder"}),
    ("an unknown key", {"model_type": "bert", "hiden_size": 3}),
    ("a text as a size", {"model_type": "bert", "vocab_size": "x"}),
    ("too few tokens", {"model_type": "bert", "vocab_size": 3}),
    ("no layers", {"model_type": "bert", "num_hidden_layers": 0}),
    ("a billion layers", {"model_type": "bert", "num_hidden_layers": 10**9}),
    ("more memory than there is", {"model_type": "bert", "hidden_size": 12 * 10**6}),
    ("NaN", {"model_type": "bert", "layer_norm_eps": NAN}),
    ("a kernel of the Hub", {"model_type": "bert", "attn_implementation": "owner/kernel"}),
    ("a type for images", {"model_type": "vit"}),
    ("heads that do not divide", {"model_type": "bert", "hidden_size": 30, "num_attention_heads": 4}),
    ("a map as a size", {"model_type": "bert", "hidden_size": {}}),
    ("a layer list of another length", {"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"]}),
]


@pytest.mark.parametrize("config", [config for _, config in RANDOM], ids=[name for name, _ in RANDOM])
def test_a_config_for_random_weights(config: dict[str, Any], tiny_bert: Path) -> None:
    with pytest.raises(InputError) as caught:
        check_model(ModelConfig(config=config, init="random", task="text-classification"), 2, 16, str(tiny_bert))
    one_line(caught.value, "model")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NORM = "bert.encoder.layer.0.output.LayerNorm.bias"
WEIGHTS: list[tuple[str, Callable[[dict[str, torch.Tensor]], None], str]] = [
    ("too large for float32", lambda t: t.update({NORM: torch.full((32,), 1e300, dtype=torch.float64)}), NORM),
    ("NaN in float64", lambda t: t.update({NORM: torch.full((32,), NAN, dtype=torch.float64)}), NORM),
    ("infinity in float16", lambda t: t.update({NORM: torch.full((32,), INF, dtype=torch.float16)}), NORM),
    *(
        (str(dtype), lambda t, dtype=dtype: t.update({NORM: torch.ones(32, dtype=dtype)}), NORM)  # type: ignore[misc]
        for dtype in (torch.int64, torch.int8, torch.bool, torch.uint8)
    ),
    ("integers under an old name", lambda t: t.update({NORM[:-4] + "beta": t.pop(NORM).long()}), "beta"),
    ("integers in the head", lambda t: t.update({"classifier.bias": torch.ones(2, dtype=torch.int32)}), "classifier.bias"),
    ("a weight less", lambda t: t.pop(NORM), NORM),
    ("another shape", lambda t: t.update({NORM: torch.ones(33)}), NORM),
    ("a layer more", lambda t: t.update({NORM.replace("layer.0", "layer.7"): torch.ones(32)}), "layer.7"),
    ("nothing at all", lambda t: t.clear(), "model.path"),
]


@pytest.mark.parametrize(("change", "named"), [case[1:] for case in WEIGHTS], ids=[case[0] for case in WEIGHTS])
def test_weights_that_cannot_be_right(change: Callable[[dict[str, torch.Tensor]], None], named: str, folder: Path, tmp_path: Path) -> None:
    change_weights(folder, change)
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError) as caught:
        import_model(model(folder), LABELS, 0, tmp_path / "out")
    one_line(caught.value, named)


def test_a_buffer_of_integers_is_allowed(folder: Path, tmp_path: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"bert.embeddings.position_ids": torch.arange(40)[None]}))
    (tmp_path / "out").mkdir()
    import_model(model(folder), LABELS, 0, tmp_path / "out")


HEADERS: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("a length alone", (10**15).to_bytes(8, "little")),
    ("no JSON", (4).to_bytes(8, "little") + b"\xff\xff\xff\xff"),
    ("a list", (2).to_bytes(8, "little") + b"[]"),
    ("deep", (40_000).to_bytes(8, "little") + b"[" * 40_000),
    *(
        (name, len(text).to_bytes(8, "little") + text + bytes(16))
        for name, text in (
            ("an unknown type", b'{"a":{"dtype":"X9","shape":[4],"data_offsets":[0,16]}}'),
            ("a negative size", b'{"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}'),
            ("fractions", b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0.5,16.5]}}'),
            ("beyond the end", b'{"a":{"dtype":"F32","shape":[4000],"data_offsets":[0,16000]}}'),
            ("no offsets", b'{"a":{"dtype":"F32","shape":[4]}}'),
            ("a number as tensor", b'{"a":4}'),
            ("huge numbers", b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,16]}}'),
        )
    ),
]


@pytest.mark.parametrize("content", [content for _, content in HEADERS], ids=[name for name, _ in HEADERS])
def test_weight_files_that_are_none(content: bytes, folder: Path) -> None:

    (folder / "model.safetensors").write_bytes(content)
    for read in (lambda: check_model(model(folder), 2, 16), lambda: Checkpoint(folder, "model.path").weights):
        with pytest.raises(InputError) as caught:
            read()
        one_line(caught.value, "model.safetensors")


NO_FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]


@pytest.mark.parametrize("name", NO_FILES)
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_only_plain_files_are_opened(name: str, kind: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError) as caught:
        import_model(model(folder), LABELS, 0, tmp_path / "out")
    one_line(caught.value, name, "FIFO" if kind == "fifo" else "device")


PATHS = ["~nosuchuser/x", "/" + "x" * 5000, "/x\x00y", "", "/dev/null", "./absent", "no/such/hub/id", "/proc/self/mem", "a b/c d"]


@pytest.mark.parametrize("path", PATHS, ids=[str(number) for number in range(len(PATHS))])
def test_a_path_of_a_model_that_leads_nowhere(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pydantic import ValidationError

    def unreachable(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no network in tests")

    if "hub" not in path:
        monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises((InputError, ValidationError)) as caught:
        check_model(model(path), 2, 16)
    if isinstance(caught.value, InputError):
        one_line(caught.value, "model")


TOKENIZER: list[tuple[str, Any]] = [
    *(("model_max_length", value) for value in ("x", [1], {}, -5, 0.5, NAN, INF, 4, True)),
    *(("padding_side", value) for value in (["right"], {}, "left", 3)),
    *(("truncation_side", value) for value in ("left", [], {"a": 1})),
    *(("pad_token_type_id", value) for value in ("x", [1], 1.5, -1)),
]


@pytest.mark.parametrize(("name", "value"), TOKENIZER, ids=[f"{name}-{number}" for number, (name, _) in enumerate(TOKENIZER)])
def test_settings_of_a_tokenizer_of_a_wrong_type(name: str, value: Any, folder: Path) -> None:
    edit(folder / "tokenizer_config.json", **{name: value})
    with pytest.raises(InputError) as caught:
        Checkpoint(folder).preprocessor("text-classification", 16, Target())
    named = "" if name != "model_max_length" or value == 4 else "tokenizer_config.json" if value in (NAN, INF) else name
    one_line(caught.value, named)  # NaN and Infinity are no JSON


@pytest.mark.parametrize("value", [7, [], {}, {"content": 7}, "", "no such token", "\ud800"])
def test_a_padding_token_that_is_none(value: Any, folder: Path) -> None:
    edit(folder / "tokenizer_config.json", pad_token=value)
    edit(folder / "config.json", pad_token_id=None)
    with pytest.raises(InputError) as caught:
        Checkpoint(folder).preprocessor("text-classification", 16, Target())
    one_line(caught.value, "tokenizer_config.json" if value == "\ud800" else "pad_token")


TOKENIZER_FILES = [b"", b"{", b"[]", b"7", b"{}", b'{"model": 7}', b"\xff\xfe", b"[" * 20_000, b'{"version":"1.0","model":{"type":"BPE"}}']


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", TOKENIZER_FILES, ids=[str(number) for number in range(len(TOKENIZER_FILES))])
def test_damaged_tokenizer_files(name: str, content: bytes, folder: Path) -> None:
    from foundation.models.inputs.tokenizer import load_tokenizer

    (folder / name).write_bytes(content)
    for read in (lambda: Checkpoint(folder).preprocessor("text-classification", 16, Target()), lambda: load_tokenizer(str(folder))):
        try:
            read()
        except InputError as error:
            one_line(error, "")
        else:
            assert name == "tokenizer_config.json", content
            assert isinstance(json.loads(content), dict)


IMAGE: list[tuple[str, Any]] = [
    *(
        ("size", value)
        for value in (7, "x", {"height": "x", "width": 8}, {"height": 10**9, "width": 8}, {"height": -8, "width": 8}, {"a": 1}, [8, 8])
    ),
    *(("resample", value) for value in (99, "x", -1, [2])),
    *(("rescale_factor", value) for value in ("x", NAN, 1e300, None)),
    *(("image_mean", value) for value in ("x", [0.5, 0.5], NAN, [[0.5]], None)),
    *(("image_std", value) for value in (0, [0.0], "x", INF, None)),
    ("image_processor_type", "NoSuchProcessor"),
    ("image_processor_type", 7),
    ("crop_size", {"height": 10**9, "width": 3}),
    ("crop_size", "x"),
    ("auto_map", {"AutoImageProcessor": "code.Own"}),
]


@pytest.mark.parametrize(("name", "value"), IMAGE, ids=[f"{name}-{number}" for number, (name, _) in enumerate(IMAGE)])
def test_settings_of_images_that_cannot_be_right(name: str, value: Any, tiny_vit: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_vit, tmp_path / "source"))
    edit(folder / "preprocessor_config.json", **{name: value}, **({"do_center_crop": True} if name == "crop_size" else {}))
    if name == "auto_map":
        edit(folder / "preprocessor_config.json", image_processor_type="Own")
    try:
        found = Checkpoint(folder).preprocessor("image-classification", 8, Target())
    except InputError as error:
        one_line(error, "")
    else:  # Transformers reads 7 as a square of 7 pixels, and null as its default
        assert found.steps is not None
        assert value is None or name == "size"
