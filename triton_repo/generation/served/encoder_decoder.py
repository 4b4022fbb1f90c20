"""Stands for `foundation/standalone/encoder_decoder.py`, which lies in its place next to a served model."""

from foundation.standalone.encoder_decoder import EncoderDecoder, Group

__all__ = ["EncoderDecoder", "Group"]
