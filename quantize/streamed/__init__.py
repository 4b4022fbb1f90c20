"""A language model that is quantized one decoder layer at a time, from file to file."""
