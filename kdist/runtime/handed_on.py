"""What the virtual stages of one replica hand each other: activations forth, gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.dtensor.sharded import Sharded, each
from kdist.pipeline.communication import Message
from kdist.pipeline.instructions import BackwardWeight, Forward, Instruction

import tensorflow as tf

Unit = tuple[int, int]
"""(virtual stage, micro-batch)"""
Activations = tuple[dict[str, Any], dict[str, Any]]
"""Boundary tensors by name, and the Keras masks of some of them."""


class HandedOn:
    """What has been made for a neighbouring virtual stage, and not been used yet.

    What stays on a stage is used where it is. What another stage uses is sent and received first.

    Args:
        stages: How many stages there are.

    Attributes:
        forth: What the forward of a unit made.
        back: What its backward made: a gradient, or None, of each tensor that it was given.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self.forth: dict[Unit, Activations] = {}
        self.back: dict[Unit, list[Any]] = {}
        self._sent: dict[Message, Any] = {}

    def send(self, message: Message) -> None:
        """Puts what an instruction made on its way."""
        self._sent[message] = self._made(message.source).pop(self._unit(message.source))

    def receive(self, message: Message, devices: Sequence[str]) -> None:
        """Takes a message to the devices of its stage, where the instruction that uses it looks.

        Each device sends its part to its peer, a tensor once, whatever its names.
        """
        moved: dict[int, Sharded] = {}

        def move(tensor: Sharded | None) -> Sharded | None:
            if tensor is not None and id(tensor) not in moved:
                moved[id(tensor)] = each(tf.identity, devices, tensor)
            return moved.get(id(tensor))

        made, unit = self._made(message.source), self._unit(message.source)
        made[unit] = tf.nest.map_structure(move, self._sent.pop(message))

    def incoming(self, one: Instruction) -> list[Any]:
        """What an instruction finds of another virtual stage; of a tensor in parts, the first."""
        virtual, i = self._unit(one)
        found: Sequence[Any] = []
        if isinstance(one, Forward):
            boundary, masks = self.forth.get((virtual - 1, i), ({}, {}))
            found = [*boundary.values(), *masks.values()]
        elif not isinstance(one, BackwardWeight):
            found = self.back.get((virtual + 1, i), [])
        return [t.parts[0] for t in found if t is not None]

    def _made(self, source: Instruction) -> dict[Unit, Any]:
        """Where results of such an instruction lie."""
        return self.forth if isinstance(source, Forward) else self.back

    def _unit(self, one: Instruction) -> Unit:
        return one.virtual_stage(self._stages), one.micro_batch
