"""The rungs of a search, in rising order of cost; each file is one rung, which explains why it drops a candidate."""
