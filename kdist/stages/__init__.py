"""A model cut into pipeline stages: which layer is where, and what each stage computes."""
