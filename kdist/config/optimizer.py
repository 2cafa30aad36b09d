"""What the user says about optimizer parallelism: a frozen dataclass, validated once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from kdist.config.state_format import StateFormatConfig
from kdist.config.unknown_fields import explains_fields

LEVELS = (0, 1, 2, 3)
PARTITIONS = ("auto", "slice", "parameter")
PLACES = ("device", "host")


@explains_fields
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How optimizer state, gradients and parameters are spread over the data axis.

    The levels are those of ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054); threshold, opt-out and
    accumulation are those of MindSpore's `enable_parallel_optimizer`. Off by default.

    Raises:
        ValueError: For a value that is not listed, or a combination without effect.

    Example:
    ```python
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=8), optimizer=kdist.OptimizerConfig(level=2, threshold_kb=64)
    )
    ```
    """

    level: int = 0
    """0: off. 1: optimizer state is cut over `data`. 2: gradients too: each goes to the shards'
    owners as soon as its chunk's backward pass has made it, and is freed. 3: parameters too:
    they are stored cut, gathered before use, and freed after it."""

    threshold_kb: float = 64
    """Parameters of fewer than `threshold_kb * 1024` bytes (of the whole shape) stay whole;
    exactly at it, they are cut."""

    gradient_accumulation_shard: bool = False
    """With the optimizer's `gradient_accumulation_steps`: False keeps each replica's own sum,
    whole, and communicates once per update. True, from level 1 on, keeps sums as shards, at one
    reduce-scatter per micro-step."""

    partition: Literal["auto", "slice", "parameter"] = "auto"
    """`"slice"`: of each parameter the first dim that divides is cut over the replicas; for
    optimizers whose update of an element looks at that element alone. `"parameter"`: whole
    parameters are dealt to replicas, balanced by bytes; for any optimizer. `"auto"`: the first
    where the optimizer and the sizes allow it, else the second; but of parameters of equal size, N
    at a time are dealt to N replicas, which is as even in fewer messages (from level 2 on where
    devices share memory)."""

    keep_gathered: bool = False
    """At level 3: keep gathered parameters from the forward to the backward pass, instead of
    gathering them twice."""

    state_format: StateFormatConfig = StateFormatConfig()
    """Formats of the optimizer's moments; see `StateFormatConfig`. As Keras keeps them by
    default."""

    state_on: Literal["device", "host"] = "device"
    """`"host"`: optimizer state, a copy of the parameters, and the update are in host memory, at
    every level (ZeRO-Offload: Ren et al. 2021, arXiv:2101.06840). Gradients go there,
    bucket by bucket as they become complete, and new values come back. The host is that of
    `kdist.place`."""

    def __post_init__(self) -> None:
        if type(self.level) is not int or self.level not in LEVELS:
            raise ValueError(f"level is 0, 1, 2 or 3. Received: level={self.level!r}")
        number = isinstance(self.threshold_kb, int | float)
        if not number or isinstance(self.threshold_kb, bool) or not self.threshold_kb >= 0:
            raise ValueError(
                "threshold_kb is a number of KB (1024 bytes), 0 to cut every parameter. "
                f"Received: threshold_kb={self.threshold_kb!r}"
            )
        for name in ("gradient_accumulation_shard", "keep_gathered"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"{name} is True or False. Received: {name}={getattr(self, name)!r}"
                )
        if self.partition not in PARTITIONS:
            raise ValueError(
                "partition is 'auto', 'slice' or 'parameter'. "
                f"Received: partition={self.partition!r}"
            )
        if self.state_on not in PLACES:
            raise ValueError(
                f"state_on is 'device' or 'host'. Received: state_on={self.state_on!r}"
            )
        if not isinstance(self.state_format, StateFormatConfig):
            raise ValueError(
                "state_format is a kdist.StateFormatConfig(first=..., second=...). "
                f"Received: state_format={self.state_format!r}"
            )
        self._refuse_without_effect()

    def _refuse_without_effect(self) -> None:
        if self.keep_gathered and self.level != 3:
            raise ValueError(
                "Only level 3 gathers parameters. Leave keep_gathered out, or set level=3. "
                f"Received: keep_gathered=True, level={self.level}"
            )
        if self.gradient_accumulation_shard and self.level == 0:
            raise ValueError(
                "Accumulated gradients are kept as shards from level 1 on. Leave "
                "gradient_accumulation_shard out, or raise the level. "
                "Received: gradient_accumulation_shard=True, level=0"
            )
        if self.partition != "auto" and self.state_on == "host" and self.level < 3:
            raise ValueError(
                "What is updated on the host is cut over devices at level 3 alone, where weights "
                "are. Set level=3, or leave partition or state_on='host' out. "
                f"Received: partition={self.partition!r}, state_on='host', level={self.level}"
            )
        if self.partition != "auto" and self.level == 0:
            raise ValueError(
                "Level 0 cuts nothing. Leave partition out, or raise the level. "
                f"Received: partition={self.partition!r}, level=0"
            )

    def uncut(self) -> OptimizerConfig:
        """The same at level 0, without what goes with another level."""
        return dataclasses.replace(
            self,
            level=0,
            partition="auto",
            keep_gathered=False,
            gradient_accumulation_shard=False,
        )

    @property
    def threshold_bytes(self) -> float:
        """The threshold in bytes."""
        return self.threshold_kb * 1024

    def __str__(self) -> str:
        text = f"level {self.level}, threshold {self.threshold_kb:g} KB, partition {self.partition}"
        if self.level == 0:
            text = "level 0 (off)"
        if self.keep_gathered:
            text += ", gathered parameters kept"
        if self.gradient_accumulation_shard:
            text += ", accumulated gradients sharded"
        if self.state_on == "host":
            text += ", state on the host"
        if self.state_format.encodes:
            form = self.state_format
            text += f", moments {form.first} and {form.second}, {form.rounding} rounding"
        return text
