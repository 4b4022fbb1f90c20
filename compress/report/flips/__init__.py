"""Predictions that changed from one backend to the next: what a flip is of each kind of answer, one file for each."""
