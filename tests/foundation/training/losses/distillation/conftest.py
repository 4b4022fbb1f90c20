"""The tiny models of the stage `distill`."""

from tests.distill.conftest import checkpoint, make_context, make_features, make_model, told

__all__ = ["checkpoint", "make_context", "make_features", "make_model", "told"]
