"""Training callbacks of kdist, imported as `kdist.callbacks`."""
