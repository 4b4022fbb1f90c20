"""The base class of stages, and the context that the pipeline passes to them."""
