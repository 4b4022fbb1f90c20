"""Foundations that every other package uses: errors, typed configs, task facts and progress."""
