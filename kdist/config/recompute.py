"""What users say about recompute: which layers run again in the backward pass, and how."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from kdist.config.settings import Setting
from kdist.config.unknown_fields import explains_fields

import keras

POLICIES = ("full", "selective", "budget")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recompute:
    """What `kdist.recompute` said of a layer; see there."""

    mode: bool = True
    mp_comm_recompute: bool = True
    parallel_optimizer_comm_recompute: bool | None = None

    def __post_init__(self) -> None:
        for name in ("mode", "mp_comm_recompute"):
            _check_bool(name, getattr(self, name))
        if self.parallel_optimizer_comm_recompute is not None:
            name = "parallel_optimizer_comm_recompute"
            _check_bool(name, getattr(self, name), " or None")


recompute_setting: Setting[Recompute] = Setting("kdist.recompute")


def recompute(
    layer: keras.layers.Layer,
    mode: bool = True,
    mp_comm_recompute: bool = True,
    parallel_optimizer_comm_recompute: bool | None = None,
) -> keras.layers.Layer:
    """Has a layer's call run again in the backward pass, instead of keeping what it computed.

    What goes into the layer is kept, and what other layers take of it; the rest is computed again
    when the gradient arrives (Chen et al. 2016, arXiv:1604.06174). Random masks are the same, since
    their seeds are kept, and statistics move once. The interface is that of MindSpore's
    `Cell.recompute`. Takes effect with the next `compile`; layers inside are part of the same
    block, unless they were given a setting of their own. Of a model that is parallelized, each of
    its layers is a block.

    Args:
        layer: The layer, or block of layers.
        mode: False keeps everything of this layer, also inside a block that runs again.
        mp_comm_recompute: Whether collectives of inner axes run again too. False keeps what they
            returned; the backward pass then repeats local work alone.
        parallel_optimizer_comm_recompute: Whether parameters of this layer that level 3, or a data
            axis in a layout, gathers are freed after the forward pass and gathered again. None: as
            `OptimizerConfig.keep_gathered` says.

    Returns:
        The layer.

    Raises:
        ValueError: The target is no layer, or a value is not listed.

    Example:
        >>> model = build_model()
        >>> for name in ("up", "down"):
        ...     kdist.recompute(model.get_layer(name), mp_comm_recompute=False)
        >>> model = kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2)))
    """
    if not isinstance(layer, keras.layers.Layer):
        raise ValueError(
            "kdist.recompute takes a keras layer or a model. "
            f"Received: {layer!r} of type {type(layer).__name__}"
        )
    value = Recompute(
        mode=mode,
        mp_comm_recompute=mp_comm_recompute,
        parallel_optimizer_comm_recompute=parallel_optimizer_comm_recompute,
    )
    recompute_setting.set(layer, value)
    return layer


@explains_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    r"""Which layers of a model run again in the backward pass.

    `kdist.recompute` of a single layer wins.

    Raises:
        ValueError: For a value that is not listed, or no pattern.

    Example:
    ```python
    # Layers that a pattern's group names alike are one block.
    again = kdist.RecomputeConfig(layers=[r"block_(\d+)_.*"])
    config = kdist.ParallelConfig(mesh=kdist.mesh(data=2), recompute=again)
    ```
    """

    layers: Sequence[str] = (".*",)
    """Regular expressions for paths of layers; each must match one. A layer and all inside it are a
    block. Layers whose paths agree in the pattern's groups, `(...)`, are one block together."""

    policy: Literal["full", "selective", "budget"] = "full"
    """`"full"`: of a block, its inputs are kept, and what other layers take of it. `"selective"`:
    matrix products, convolutions, random numbers and communication are not repeated; of the rest
    the fewest bytes are kept, by a minimum cut (Chen et al. 2016; Korthikanti et al. 2022,
    arXiv:2205.05198, choose by hand). `"budget"`: of the blocks, what takes the least time is
    repeated so that activations fit `budget_mb` (Jain et al. 2020, arXiv:1910.02653)."""

    budget_mb: float | None = None
    """The most that activations may take on a device at once, in MB of 2^20 bytes; needed by
    `policy="budget"`, and by no other. Training raises a ValueError if they do not fit even
    with everything repeated, and says what they need. What was chosen is a note of the plan."""

    mp_comm_recompute: bool = True
    """See `kdist.recompute`."""

    parallel_optimizer_comm_recompute: bool | None = None
    """See `kdist.recompute`."""

    def __post_init__(self) -> None:
        if isinstance(self.layers, str) or not (isinstance(self.layers, Iterable) and self.layers):
            raise ValueError(
                "layers is a list of regular expressions for paths of layers. "
                f"Received: layers={self.layers!r}"
            )
        for pattern in self.layers:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"layers has regular expressions ({error}). Received: {pattern!r}"
                ) from None
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.policy not in POLICIES:
            raise ValueError(
                f"policy is 'full', 'selective' or 'budget'. Received: policy={self.policy!r}"
            )
        self._check_budget()
        self.setting  # noqa: B018 (checks the rest)

    def _check_budget(self) -> None:
        """Refuses a budget that is no number above 0, and one without its policy."""
        given = self.budget_mb
        if (self.policy == "budget") != (given is not None):
            raise ValueError(
                "policy='budget' takes budget_mb, the other policies do not. "
                f"Received: policy={self.policy!r}, budget_mb={given!r}"
            )
        number = isinstance(given, int | float) and not isinstance(given, bool)
        if given is not None and not (number and 0 < given < math.inf):
            raise ValueError(f"budget_mb is a number above 0. Received: budget_mb={given!r}")

    @property
    def setting(self) -> Recompute:
        """What it says of a layer that it names."""
        return Recompute(
            mp_comm_recompute=self.mp_comm_recompute,
            parallel_optimizer_comm_recompute=self.parallel_optimizer_comm_recompute,
        )

    def __str__(self) -> str:
        limit = "" if self.budget_mb is None else f" of {self.budget_mb:g} MB"
        text = f"{self.policy}{limit}, layers {', '.join(map(repr, self.layers))}"
        if not self.mp_comm_recompute:
            text += ", collectives of inner axes not repeated"
        if self.parallel_optimizer_comm_recompute is not None:
            again = self.parallel_optimizer_comm_recompute
            text += f", gathered parameters {'gathered again' if again else 'kept'}"
        return text


def _check_bool(name: str, value: Any, more: str = "") -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is True or False{more}. Received: {name}={value!r}")
