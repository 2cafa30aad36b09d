"""A batch whose rows are in several processes, and what goes wrong with those."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from kdist.runtime.worker_data import WorkerDataset

SAME = (
    "A tf.data.Dataset has the same elements in every process, each of which reads it. Give all of "
    "them the same files, or arrays in place of a Dataset, which process 0 reads."
)


@dataclasses.dataclass(frozen=True)
class Taken:
    """A batch whose rows are where they were read, or will be.

    Attributes:
        dataset: What it is of.
        first: What process 0 kept of it.
        others: The other processes' iterators; where they read files of their own, what they kept.
    """

    dataset: WorkerDataset
    first: tf.experimental.Optional
    others: Sequence[Any]

    def whole(self) -> Any:
        """The batch with all its rows, in process 0."""
        with ending_together():
            return self.dataset.batch(self.first.get_value(), self.others)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of its tensors; none where process 0 cannot tell, of rows that it has not read."""
        rows = self.dataset.rows
        apart = self.dataset.apart or not rows.replicas[0]
        return () if apart else rows.shapes(self.first.get_value())


def alive(dataset: weakref.ref[WorkerDataset]) -> WorkerDataset:
    """A dataset whose graphs are made, and must not keep it: who calls them has it."""
    found = dataset()
    assert found is not None
    return found


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Around what takes a batch that process 0 has: names the end of another's data.

    Raises:
        RuntimeError: Another process has no such batch.
    """
    try:
        yield
    except tf.errors.OutOfRangeError as error:
        raise RuntimeError(
            f"{SAME} Received: fewer batches than in process 0 ({error.message})"
        ) from error
