"""The comparison of several runs: what differs in their recipes, their machines and their figures."""
