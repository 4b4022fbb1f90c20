"""The table of tokens made smaller: fewer tokens, or a lower rank."""
