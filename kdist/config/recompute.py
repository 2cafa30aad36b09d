"""What users say about recompute: which layers run again in the backward pass, and how."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from kdist._compat import keras_models, keras_remat
from kdist.config.settings import Setting
from kdist.sharding.layout import closest_names

import keras

POLICIES = ("full", "selective", "budget")

SHOWN_BLOCKS = 3
"""Blocks that a line names."""


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
    `Cell.recompute`. It takes effect in `kdist.parallelize`; layers inside are part of the same
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
        >>> for block in model.blocks:
        ...     kdist.recompute(block, mp_comm_recompute=False)
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
    `policy="budget"`, and by no other. Training raises a ValueError if by far they do not fit even
    with everything repeated, and says what they need. What was chosen is a note of the plan."""

    mp_comm_recompute: bool = True
    """See `kdist.recompute`."""

    parallel_optimizer_comm_recompute: bool | None = None
    """See `kdist.recompute`."""

    def __post_init__(self) -> None:
        if isinstance(self.layers, str) or not self.layers:
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


@dataclasses.dataclass(frozen=True)
class Block:
    """Layers of a model that run again together.

    Attributes:
        name: Path of its layer, or of the first of its layers.
        policy: See `RecomputeConfig`.
        setting: What was said of it.
    """

    name: str
    policy: str
    setting: Recompute


@dataclasses.dataclass(frozen=True)
class Choice:
    """What `policy="budget"` chose for a program.

    Attributes:
        peak: Bytes of activations that a device has at once at most, estimated from the program;
            above the budget only if everything runs again.
        repeated: Estimated seconds of what runs again, in a pass over the program.
        seconds: Those of all that could.
        why: Why there was no choice, "" if there was.
    """

    peak: int
    repeated: float
    seconds: float
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return f"everything runs again: {self.why}"
        share = self.repeated / self.seconds if self.seconds else 0.0
        return (
            f"activations of {self.peak / 2**20:.4g} MB, estimated; of the blocks' forward pass "
            f"{share:.0%} of the time runs again ({1e3 * self.repeated:.3g} of "
            f"{1e3 * self.seconds:.3g} ms, estimated)"
        )


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a model.

    Attributes:
        blocks: They.
        layers: Layers in which a block begins, with its number; None where one is left out.
        freed: By identity of a weight, whether it is gathered again in the backward pass, where its
            layer says so.
        of: By identity of a weight, the block that it belongs to.
        budget: Bytes that activations may take, for blocks of that policy.
        scoped: Operations that `keras.RematScope` would have repeated by a way of its own.
        choices: What was chosen for it, by stage of a pipeline, "" without one; filled when a
            training step is traced.
    """

    blocks: tuple[Block, ...] = ()
    layers: tuple[tuple[keras.layers.Layer, int | None], ...] = ()
    freed: dict[int, bool] = dataclasses.field(default_factory=dict)
    of: dict[int, int] = dataclasses.field(default_factory=dict)
    budget: int | None = None
    scoped: tuple[Any, ...] = ()
    choices: dict[str, Choice] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def describe(self) -> str:
        """One line for the plan."""
        policies = " and ".join(sorted({one.policy for one in self.blocks}))
        names = [one.name for one in self.blocks]
        shown = ", ".join(names[:SHOWN_BLOCKS])
        more = f" and {len(names) - SHOWN_BLOCKS} more" if names[SHOWN_BLOCKS:] else ""
        kept = sum(not one.setting.mp_comm_recompute for one in self.blocks)
        alone = f"; collectives of inner axes are kept in {kept} of them" if kept else ""
        found = f"recompute ({policies}): {len(names)} blocks, from {shown}{more}{alone}"
        return found + self._chosen()

    def _chosen(self) -> str:
        """What is repeated for a budget."""
        if self.budget is None:
            return ""
        text = f"; budget {self.budget / 2**20:.4g} MB per device"
        if not self.choices:
            return f"{text}, what is repeated is chosen when a training step is traced"
        by_stage = [f"{name}: {one}" if name else str(one) for name, one in self.choices.items()]
        return f"{text}: {'; '.join(by_stage)}"


def blocks_of(model: keras.Model, config: RecomputeConfig | None) -> Blocks:
    """The blocks of a model: what was declared on its layers, else what the configuration says.

    Raises:
        ValueError: A pattern of the configuration matches no layer.
    """
    return _Walk(model, config).found()


class _Walk:
    """Goes through the layers of a model, from the outside in."""

    def __init__(self, model: keras.Model, config: RecomputeConfig | None) -> None:
        self.model, self.config = model, config
        known = {id(layer) for layer in keras_models.flat_layers(model)}
        given = recompute_setting.given()
        self.given = {id(one): value for one, value in given if id(one) in known}
        self.blocks: list[Block] = []
        self.layers: list[tuple[keras.layers.Layer, int | None]] = []
        self.freed: dict[int, bool] = {}
        self.of: dict[int, int] = {}
        self.by_key: dict[Any, int] = {}
        self.seen: set[int] = {id(model)}
        self.matched: set[str] = set()

    def found(self) -> Blocks:
        """The blocks."""
        whole = self.given.get(id(self.model))
        for layer in keras_models.layers_inside(self.model):
            self._visit(layer, whole, None, new=True)
        if self.config is not None:
            self._refuse_unmatched(self.config)
        limit = None if self.config is None else self.config.budget_mb
        budget = None if limit is None else int(limit * 2**20)
        scoped = tuple(keras_remat.with_remat(keras_remat.operations_of(self.model)))
        return Blocks(tuple(self.blocks), tuple(self.layers), self.freed, self.of, budget, scoped)

    def _visit(
        self, layer: keras.layers.Layer, call: Recompute | None, block: int | None, new: bool
    ) -> None:
        """Decides about a layer.

        Args:
            layer: The layer.
            call: What was declared on a layer around it, the innermost one.
            block: The block that it is in so far.
            new: Whether what was declared on the model begins a block here.
        """
        if id(layer) in self.seen or isinstance(layer, keras.layers.InputLayer):
            return
        self.seen.add(id(layer))
        own = self.given.get(id(layer))
        scope = None if own or call or block is not None else keras_remat.policy_of(layer)
        pattern = self._pattern(layer)
        mine = own or call
        if mine is not None:
            if own is not None or new:
                block = self._entered(layer, mine, block)
        elif scope is not None:
            block = self._begun(layer, Block(_path(layer), scope, Recompute()))
        elif pattern is not None and block is None and self.config is not None:
            block = self._of_config(layer, pattern)
        setting = mine or (None if block is None else self.blocks[block].setting)
        again = None if setting is None else setting.parallel_optimizer_comm_recompute
        if again is not None:
            self.freed.update((id(v), again) for v in layer.weights)
        if block is not None:
            self.of.update((id(v), block) for v in layer.weights)
        for inner in keras_models.layers_inside(layer):
            self._visit(inner, mine, block, new=False)

    def _entered(
        self, layer: keras.layers.Layer, setting: Recompute, block: int | None
    ) -> int | None:
        """The block of a layer that was declared."""
        if not setting.mode:
            if block is not None:
                self.layers.append((layer, None))
            return None
        if block is not None and self.blocks[block].setting == setting:
            return block
        return self._begun(layer, Block(_path(layer), "full", setting))

    def _begun(self, layer: keras.layers.Layer, block: Block) -> int:
        self.blocks.append(block)
        self.layers.append((layer, len(self.blocks) - 1))
        return len(self.blocks) - 1

    def _of_config(self, layer: keras.layers.Layer, match: re.Match[str]) -> int:
        """The block of a layer that a pattern names."""
        assert self.config is not None
        key = (match.re.pattern, match.groups()) if match.groups() else id(layer)
        if key in self.by_key:
            self.layers.append((layer, self.by_key[key]))
        else:
            block = Block(_path(layer), self.config.policy, self.config.setting)
            self.by_key[key] = self._begun(layer, block)
        return self.by_key[key]

    def _pattern(self, layer: keras.layers.Layer) -> re.Match[str] | None:
        """The match of the first pattern that names a layer."""
        found = None
        for pattern in self.config.layers if self.config is not None else ():
            match = re.fullmatch(pattern, _path(layer)) or re.fullmatch(pattern, layer.name)
            if match is not None:
                self.matched.add(pattern)
                found = found or match
        return found

    def _refuse_unmatched(self, config: RecomputeConfig) -> None:
        for pattern in config.layers:
            if pattern not in self.matched:
                names = [_path(layer) for layer in keras_models.flat_layers(self.model)]
                raise ValueError(
                    f"{pattern!r} of RecomputeConfig(layers=...) matches no layer; the closest are "
                    f"{closest_names(pattern, names)}. Correct or remove it. "
                    f"Received: layers={list(config.layers)}"
                )


def _path(layer: keras.layers.Layer) -> str:
    return str(layer.path or layer.name)


def _check_bool(name: str, value: Any, more: str = "") -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is True or False{more}. Received: {name}={value!r}")
