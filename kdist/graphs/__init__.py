"""Traced and executed graphs: cutting them, reading them, what is alive in them."""
