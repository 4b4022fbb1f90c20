"""A large language model labels the rows of a small model: prompts, label words, calibration, and texts that it writes itself."""
