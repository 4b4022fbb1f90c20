"""How long to train: short trainings, the law that they follow, and what more data, epochs or parameters are worth."""
