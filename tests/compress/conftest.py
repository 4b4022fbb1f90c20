"""The fixtures of the foundation's tests: tiny checkpoints, and a progress that keeps its lines."""

from tests.foundation.conftest import bert_config, folder, out, tiny_bert, tiny_vit, told, vit_config, words

__all__ = ["bert_config", "folder", "out", "tiny_bert", "tiny_vit", "told", "vit_config", "words"]
