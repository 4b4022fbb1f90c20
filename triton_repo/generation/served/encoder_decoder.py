"""Placeholder for `foundation/standalone/encoder_decoder.py`, which replaces it next to a served model."""

from foundation.standalone.encoder_decoder import EncoderDecoder, Group

__all__ = ["EncoderDecoder", "Group"]
