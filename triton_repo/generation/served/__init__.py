"""The server code of a language model: these files are copied into the Triton repository, and import only each other."""
