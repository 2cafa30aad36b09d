"""Settings that save for a smaller part of a model than one would think. Pure.

As in `kdist.config.without_effect`, notes are of the plan, and training warns of each once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from kdist.config.compression import Classes
from kdist.config.optimizer import OptimizerConfig
from kdist.config.without_effect import WithoutEffect
from kdist.display.tables import readable

MOST = 0.5
"""Of the parameters' bytes, what may stay whole without a note."""

ELSEWHERE = "another parallel model, which has it too, decides where it is stored"


@dataclasses.dataclass(frozen=True)
class WeightEffect:
    """A weight, and what a level does with it.

    Attributes:
        path: Of the weight.
        nbytes: Of the whole of it.
        how: As in `kdist.plan.partition.Decision`.
        reason: Why.
        asked: Whether the user said so: by an opt-out, a layout, a place.
    """

    path: str
    nbytes: int
    how: str
    reason: str
    asked: bool = False


def levels_in_part(
    config: OptimizerConfig, replicas: int, parts: Sequence[WeightEffect]
) -> Iterator[WithoutEffect]:
    """What a level does not save.

    Args:
        config: The settings.
        replicas: Number of them.
        parts: What trains; at level 3 also what layers made to train, and does not.
    """
    if config.level == 0 or replicas == 1:
        return
    setting, total = f"level={config.level}", sum(one.nbytes for one in parts)
    whole = [one for one in parts if one.how == "whole" and not one.asked]
    kept = sum(one.nbytes for one in whole)
    spread = any(one.how != "whole" for one in parts)  # else `without_effect` says it
    if spread and kept > MOST * total and config.state_on == "device":
        largest = max(whole, key=lambda one: one.nbytes)
        instead = "Lower threshold_kb, or see the plan's table of optimizer parallelism"
        if largest.reason.endswith("by hand"):
            instead = "Split it over the data axis, or cut it by a layout_map"
        elif largest.reason == ELSEWHERE:
            instead = "Compile that model with level 3 too"
        yield WithoutEffect(
            setting,
            f"they stay whole; the largest, {largest.path!r}: {largest.reason}",
            instead,
            f"{len(whole)} of {len(parts)} parameters, {readable(kept)} of {readable(total)}",
        )
    for one in parts:
        # An even share of all is total / replicas.
        if one.how == "parameter" and one.nbytes * replicas > 2 * total:
            yield WithoutEffect(
                setting,
                f"of {readable(total)} it has {readable(one.nbytes)}, and {one.reason}: so one "
                "device keeps all of it",
                f"Make one of its dims a multiple of {replicas}, for an optimizer that looks at "
                "one element at a time",
                f"the device that has {one.path!r}",
            )


def compression_in_part(classes: Classes | None) -> Iterator[WithoutEffect]:
    """Compression of nothing.

    Args:
        classes: How gradients travel; None if no compression is asked for.
    """
    entries = () if classes is None else classes.entries
    if entries and all(one.compressor == "none" for one in entries):
        largest = max(entries, key=lambda one: one.full_bytes)
        yield WithoutEffect(
            "compression",
            f"all {len(entries)} gradients travel as they are; the largest, {largest.path!r}: "
            f"{largest.why}",
            "Name weights in CompressionConfig(patterns=...), or leave it out",
        )
