"""What a language model in a Triton repository consists of: these files are copied there, and import nothing but each other."""
