"""Reading the rows of a run: one file for each form of data, `load` chooses among them and splits what they read."""
