"""What a candidate goes through, in rising order of cost; each file is one rung, which says why it drops a candidate."""
