"""Training against a teacher: settings, what is captured of both models, and the objective."""
