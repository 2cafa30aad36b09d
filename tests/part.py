"""A part of the selected tests: a long suite runs in several goes, or on several machines."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Part:
    """One of several parts that together are the whole.

    Attributes:
        number: Which one, from 1 on.
        count: How many there are.
    """

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Reads "2/3".

        Raises:
            argparse.ArgumentTypeError: If it is something else.
        """
        number, slash, count = text.partition("/")
        if slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count):
            return cls(int(number), int(count))
        raise argparse.ArgumentTypeError(
            "a part is written i/n, the i-th of n parts, with i from 1 to n: --part 2/3. "
            f"Received: --part {text}"
        )

    def of(self, items: Sequence[T]) -> list[T]:
        """Every `count`-th item: neighbours, which take alike, go to different parts."""
        return list(items[self.number - 1 :: self.count])

    def rest(self, items: Sequence[T]) -> list[T]:
        """The items of the other parts."""
        return [item for i, item in enumerate(items) if i % self.count != self.number - 1]
