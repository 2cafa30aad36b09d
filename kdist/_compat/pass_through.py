"""Exceptions that reach whoever waits for them as they were raised, through Keras and AutoGraph."""

from __future__ import annotations


class PassesThrough(Exception):
    """An exception that nobody makes another one of.

    AutoGraph does so in what it converts, and Keras in a call of a layer, to add the arguments.
    """

    ag_pass_through = True
    _keras_call_info_injected = True
