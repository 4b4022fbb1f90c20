"""One training in several processes: how the model is divided, rows are dealt out, and gradients come together."""
