"""The equivalence suite: kdist trains to the same numbers as one plain device."""
