"""The losses of each kind of answer, one file for each: against labels, and against another model."""
