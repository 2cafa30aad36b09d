"""Layers called by training steps of the user's own, over the mesh."""
