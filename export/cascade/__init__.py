"""Cascades: small models answer the rows that they are sure of, with a certificate of how often the answer is another one."""
