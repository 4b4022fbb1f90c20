"""What the verbs of the command line call, one verb a file; `run`, `bench` and `report` are called directly."""
