"""Events of a run as lines of JSON, for programs: `compress run --json`."""
