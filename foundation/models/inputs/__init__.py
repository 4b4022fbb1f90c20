"""Inputs of models: texts, images and sounds."""
