"""The tiny checkpoints that are broken here."""

from tests.foundation.conftest import bert_config, tiny_bert, tiny_vit

__all__ = ["bert_config", "tiny_bert", "tiny_vit"]
