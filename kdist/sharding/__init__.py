"""Meshes, layouts and placements: which axis cuts which dim, and who holds which part. Pure."""
