"""Data: found, read, labelled, and divided into what is trained on, chosen by and judged on."""
