"""`compress search`: the best settings of a recipe for its goals, found by a study of runs that share what they have in common."""
