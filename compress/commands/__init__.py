"""The functions behind the command-line verbs, one file each; `run`, `bench` and `report` call the pipeline and the report directly."""
