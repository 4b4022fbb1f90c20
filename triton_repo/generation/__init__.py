"""Language models in Triton: a repository whose models stream their answers, and the stage that checks and times them."""
