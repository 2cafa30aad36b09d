"""Every use of Keras and TensorFlow internals, a module each, each held by a test of its own."""
