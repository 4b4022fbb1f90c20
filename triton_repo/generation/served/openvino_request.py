"""Placeholder for `foundation/standalone/openvino_request.py`, which replaces it next to a served model."""

from foundation.standalone.openvino_request import for_this_cpu

__all__ = ["for_this_cpu"]
