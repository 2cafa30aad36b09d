"""A model as pure functions: state in, state out; its loss and its batch, cut for replicas."""
