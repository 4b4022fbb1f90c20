"""A certified cascade as one model of the repository: its files, its check, and what runs in the server (`served`)."""
