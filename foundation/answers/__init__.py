"""What a model answers with, one file for each kind: how answers are compared, measured and turned into labels. Uses only numpy."""
