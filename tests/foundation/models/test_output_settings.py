"""What config.json says of how a caller wants its answers is left behind at import, in configs inside it too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.models.checkpoint import load
from foundation.models.config import ModelConfig
from foundation.models.encoder_decoder import answered
from foundation.models.folder import Checkpoint
from foundation.models.importing import check_model, import_model
from tests.architectures.rebuilt import logits
from tests.architectures.steps import trained
from tests.architectures.table import ARCHITECTURES
from tests.export.generation.tiny_encoder_decoders import checkpoint, sources
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

SETTINGS: dict[str, Any] = {
    "output_attentions": True,
    "output_hidden_states": True,
    "return_dict": False,
    "torchscript": True,
    "use_return_dict": False,
}


def values(config: Any) -> Iterator[tuple[str, Any]]:
    """Yields the keys of a config.json and of all configs inside it, with their values."""
    for name, value in config.items() if isinstance(config, dict) else ():
        yield name, value
        yield from values(value)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "keys"), [*(("bert", [key]) for key in SETTINGS), *((name, [*SETTINGS]) for name in ("bart", "clip", "gpt2"))]
)
def test_output_settings_are_reset_at_import(name: str, keys: list[str], tmp_path: Path) -> None:
    architecture, out = ARCHITECTURES[name], tmp_path / "out"
    out.mkdir()
    folder = trained(architecture, tmp_path / "model")
    reference = logits(load(folder), architecture)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for part in (raw, raw.get("vision_config"), raw.get("text_config")):
        if part is not None:
            part.update({key: SETTINGS[key] for key in keys})
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    config = ModelConfig(path=str(folder), task=architecture.task)
    check_model(config, 2, 8)
    import_model(config, () if name == "gpt2" else ("a", "b"), 0, out)
    assert torch.allclose(logits(load(out), architecture), reference, atol=1e-5)
    written = list(values(json.loads((out / "config.json").read_text(encoding="utf-8"))))
    assert not [(key, value) for key, value in written if key in keys and value == SETTINGS[key]]
    assert Checkpoint(out).config.return_dict is True


@pytest.mark.parametrize("key", SETTINGS)
def test_a_config_of_random_weights_has_none(key: str, tmp_path: Path) -> None:
    config = {"model_type": "vit", "num_hidden_layers": 1, key: SETTINGS[key]}
    with raises_problem(f"model.config.{key}", "not a key of vit"):
        check_model(ModelConfig(config=config, init="random", task="image-classification"), 2)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = check_model(ModelConfig(config=str(tmp_path / "config.json"), init="random", task="image-classification"), 2)
    assert (found.config.return_dict, found.config.output_hidden_states, found.config.output_attentions) == (True, False, False)


def test_what_generate_returns_beside_answers_is_reset_too(tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("t5"), tmp_path / "model")
    file = folder / "generation_config.json"
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_attentions": True, "output_logits": True}
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **wanted}), encoding="utf-8")
    asked = sources((4, 7))
    expected = answered(load(checkpoint("t5")), asked, 2, 6)
    assert [row.tolist() for row in answered(load(folder), asked, 2, 6)] == [row.tolist() for row in expected]
