"""How many requests of a served language model wait, and for how long, unless a recipe says otherwise. Imports nothing: recipes read it."""

MAX_WAITING = 64
REQUEST_SECONDS = 600.0
