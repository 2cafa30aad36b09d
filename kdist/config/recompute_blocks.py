"""The blocks of a model: which of its layers run again together, by all that was said of it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from kdist._compat import keras_models, keras_remat
from kdist.config.recompute import Recompute, RecomputeConfig, recompute_setting
from kdist.sharding.layout import closest_names

import keras

SHOWN_BLOCKS = 3
"""Blocks that a line names."""


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
        peak: Bytes of activations that a device has at once at most, estimated from the program.
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
        wrapping: Outside of all blocks, layers that call what `keras.remat` made, with the number
            of the block that this is; None where a layer is left out.
        freed: By identity of a weight, whether it is gathered again in the backward pass, where its
            layer says so.
        of: By identity of a weight, the block that it belongs to.
        budget: Bytes that activations may take, for blocks of that policy.
        scoped: Operations that `keras.RematScope` would have repeated by a way of its own.
        choices: What was chosen for it, by stage of a pipeline, "" without one; filled when a
            training step is traced.
        short: Of stages whose activations do not fit it, the least bytes that do.
    """

    blocks: tuple[Block, ...] = ()
    layers: tuple[tuple[keras.layers.Layer, int | None], ...] = ()
    wrapping: tuple[tuple[keras.layers.Layer, int | None], ...] = ()
    freed: dict[int, bool] = dataclasses.field(default_factory=dict)
    of: dict[int, int] = dataclasses.field(default_factory=dict)
    budget: int | None = None
    scoped: tuple[Any, ...] = ()
    choices: dict[str, Choice] = dataclasses.field(default_factory=dict)
    short: dict[str, int] = dataclasses.field(default_factory=dict)

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

    def keeps_communication(self, number: int | None) -> bool:
        """Whether of a block nothing runs again that communicates over inner axes."""
        if number is None:
            return False
        one = self.blocks[number]
        return one.policy == "selective" or not one.setting.mp_comm_recompute

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
        self.wrapping: list[tuple[keras.layers.Layer, int | None]] = []
        self.freed: dict[int, bool] = {}
        self.of: dict[int, int] = {}
        self.by_key: dict[Any, int] = {}
        self.seen: set[int] = {id(model)}
        self.matched: set[str] = set()

    def found(self) -> Blocks:
        """The blocks."""
        whole = self.given.get(id(self.model))
        self._note_wrapped(self.model, whole, None)
        for layer in keras_models.layers_inside(self.model):
            self._visit(layer, whole, None, new=True)
        if self.config is not None:
            self._refuse_unmatched(self.config)
        limit = None if self.config is None else self.config.budget_mb
        budget = None if limit is None else int(limit * 2**20)
        scoped = tuple(keras_remat.with_remat(keras_remat.operations_of(self.model)))
        return Blocks(
            tuple(self.blocks),
            tuple(self.layers),
            tuple(self.wrapping),
            self.freed,
            self.of,
            budget,
            scoped,
        )

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
        self._note_wrapped(layer, mine, block)
        setting = mine or (None if block is None else self.blocks[block].setting)
        again = None if setting is None else setting.parallel_optimizer_comm_recompute
        if again is not None:
            self.freed.update((id(v), again) for v in layer.weights)
        if block is not None:
            self.of.update((id(v), block) for v in layer.weights)
        for inner in keras_models.layers_inside(layer):
            self._visit(inner, mine, block, new=False)

    def _note_wrapped(
        self, layer: keras.layers.Layer, call: Recompute | None, block: int | None
    ) -> None:
        """Makes a block of what `keras.remat` made in a layer, unless it is in one, or left out."""
        if block is not None or not keras_remat.wraps_functions(layer):
            return
        if call is not None and not call.mode:
            self.wrapping.append((layer, None))
            return
        self.blocks.append(Block(f"keras.remat in {_path(layer)}", "full", Recompute()))
        self.wrapping.append((layer, len(self.blocks) - 1))

    def _entered(
        self, layer: keras.layers.Layer, setting: Recompute, block: int | None
    ) -> int | None:
        """The block of a layer that was declared."""
        if not setting.mode:
            (self.wrapping if block is None else self.layers).append((layer, None))
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
