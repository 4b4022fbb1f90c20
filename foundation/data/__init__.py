"""Data: finding, reading and labelling rows, and splitting them into train, selection and evaluation."""
