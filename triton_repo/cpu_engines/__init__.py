"""The engines of models that are served on the CPU: each file is copied to its model as `engine.py`, and called as its row of engines.

An engine file is standalone. It offers `Engine(folder, mode, batch_sizes, properties)` with `prepare` and `predict`.
"""
