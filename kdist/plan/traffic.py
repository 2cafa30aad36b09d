"""Communication of a step, added up. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One kind of communication outside of layers, per step, summed over all devices.

    Attributes:
        what: "reduce", "share" (sums of compressed gradients, which every replica needs),
            "broadcast", "join" (new rows of several owners meet on one of them, which broadcasts
            the whole) or "gather" (before use, of what is not stored whole).
        axis: The mesh's data axis; its inner axes where it has none, "-" without either.
        collectives: Operations: one per bucket, or per part outside of buckets.
        messages: Tensors sent from one device to another.
        nbytes: Their bytes.
        joined: How many of the collectives go through one owner, where parts of several are put
            together; the messages of all others go straight from where a value is made to where
            it is used.
    """

    what: str
    axis: str
    collectives: int
    messages: int
    nbytes: int
    joined: int = 0


@dataclasses.dataclass
class Count:
    """Collectives, their messages and bytes, added up."""

    collectives: int = 0
    messages: int = 0
    nbytes: int = 0
    joined: int = 0

    def add(self, sent: Sequence[tuple[int, int]], joined: bool = False) -> None:
        """Adds a collective: (messages, bytes of each)."""
        made = any(messages for messages, _ in sent)
        self.collectives += made
        self.joined += made and joined
        self.messages += sum(messages for messages, _ in sent)
        self.nbytes += sum(messages * size for messages, size in sent)
