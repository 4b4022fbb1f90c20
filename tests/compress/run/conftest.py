"""A tiny checkpoint of the foundation's tests."""

from tests.foundation.conftest import tiny_bert

__all__ = ["tiny_bert"]
