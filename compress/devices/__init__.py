"""How a model fits on devices, before anything is loaded: what it takes to serve and to train it, and how it is best divided."""
