"""Exceptions that say to trace again, from within a layer that Keras calls.

Keras makes another exception of what its layers raise, to add what they were called with, unless an
attribute says that this is there already; AutoGraph has one of its own.
`tests/_compat/test_keras_signals.py` fails by name when one of them moves.
"""

from __future__ import annotations


class Signal(Exception):
    """What layers raise arrives as it is."""

    ag_pass_through = True
    _keras_call_info_injected = True
