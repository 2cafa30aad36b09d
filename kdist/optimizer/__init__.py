"""The optimizer side of a step: who updates what, and how the user's one optimizer sees it."""
