"""Gradients that travel compressed: a `GradientSource` around the one of the slices.

What the slices computed is cast, or reduced to low-rank factors, on their own devices; only that
crosses to others. The mathematics is in `kdist.optimizer.compressors`, who sends what where in
`kdist.plan.exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from kdist.config.compression import PowerSGD, matrix_shape
from kdist.optimizer import compressors
from kdist.optimizer.gradients import GradientSource, bucket_gradients
from kdist.optimizer.low_rank import LowRankState
from kdist.plan.bucket import Bucket
from kdist.plan.exchange import Exchange, is_low_rank
from kdist.sharding.mesh import Topology
from kdist.sharding.owners import UpdateUnit
from kdist.sharding.placement import Coordinate, Placement, relative
from kdist.storage.flat_rows import flat, unflat
from kdist.storage.parts import assemble

import tensorflow as tf


class Compression:
    """The compressed gradients of one optimizer: exchanges, and what they keep between steps.

    Args:
        exchanges: What travels together.
        placements: One per trainable variable.
        topology: The mesh.
        known: What low-rank compression keeps, by identity of the variable and start of its part.
            What is there goes on; what is made is added, what is not used any more is taken away.
        variables: The trainable variables.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        placements: Sequence[Placement],
        topology: Topology,
        known: KnownStates,
        variables: Sequence[Any],
    ) -> None:
        self.exchanges = tuple(exchanges)
        self.placements = list(placements)
        self.topology = topology
        self.devices = [one.devices for one in topology.slices]
        self.states: dict[tuple[int, int], LowRankState] = {}
        used = set()
        for exchange in self.exchanges:
            if is_low_rank(exchange.compressor):
                for v, shape in zip(exchange.members, exchange.shapes):
                    start = tuple(i.start for i in placements[v].inner_index(exchange.inner))
                    key = id(variables[v]), start
                    used.add(key)
                    self.states[v, exchange.inner] = self._state(exchange, v, shape, key, known)
        for key in set(known) - used:
            del known[key]

    def _state(
        self,
        exchange: Exchange,
        v: int,
        shape: Sequence[int],
        key: tuple[int, tuple[int, ...]],
        known: KnownStates,
    ) -> LowRankState:
        """What is kept of one gradient: what there was, or from the beginning."""
        at = {s: self.devices[s][exchange.inner] for s in exchange.slices}
        if key in known:
            known[key].move(at)
            return known[key]
        # Not its path, which Keras numbers anew with every model of a process.
        name = f"{v} {list(key[1])}"
        assert isinstance(exchange.compressor, PowerSGD)
        known[key] = LowRankState(name, shape, exchange.compressor, exchange.itemsize, at)
        return known[key]

    @property
    def variables(self) -> list[tf.Variable]:
        """What is kept between steps."""
        return [v for state in self.states.values() for v in state.variables]

    def over(self, source: GradientSource, scale: Any) -> CompressedGradients:
        """A step's gradients.

        Args:
            source: The slices' gradients.
            scale: What the loss was multiplied by, None for 1.
        """
        return CompressedGradients(self, source, scale)


KnownStates = MutableMapping[tuple[int, tuple[int, ...]], LowRankState]
"""By identity of a variable and the start of its part."""

Part = Callable[[int], Any]
"""Slice -> its tensor."""


class CompressedGradients:
    """The gradients of one step; see `kdist.optimizer.gradients.GradientSource`.

    Args:
        compression: What travels how.
        source: The slices' gradients.
        scale: What the loss was multiplied by. Low-rank errors are kept without it, because it
            changes.
    """

    def __init__(self, compression: Compression, source: GradientSource, scale: Any) -> None:
        self.compression = compression
        self.source = source
        self.scale = scale
        self._updates: list[tuple[str, tf.Variable, Any]] = []
        self.last_uses: list[Any] = []
        """What uses gradients after their sums are made."""
        self._found: dict[Exchange, dict[int, list[Any]]] = {}
        self._of: dict[tuple[int, int], list[Exchange]] = {}
        for exchange in compression.exchanges:
            for v in exchange.members:
                self._of.setdefault((v, exchange.inner), []).append(exchange)

    @property
    def rows(self) -> set[int]:
        """See `GradientSource`."""
        return self.source.rows

    def local(self, variable: int, at: Coordinate) -> Any:
        """See `GradientSource`."""
        return self.source.local(variable, at)

    def commit(self) -> None:
        """Keeps errors and factors for the next step. Not for a step that is skipped."""
        for device, variable, value in self._updates:
            with tf.device(device):
                variable.assign(value)

    def unit(self, variable: int, unit: UpdateUnit) -> Any:
        """See `GradientSource`."""
        inner = range(len(self.compression.devices[0])) if unit.shard is None else [unit.owner[1]]
        exchanges = [self._exchange(variable, k, unit.owner) for k in inner]
        lanes = [exchange for exchange in exchanges if exchange is not None]
        if not lanes:
            return self.source.unit(variable, unit)
        placement = self.compression.placements[variable]
        return assemble([(placement.inner_index(e.inner), self._part(e, unit)) for e in lanes])

    def bucket(self, bucket: Bucket, live: Container[int] | None = None) -> list[Any]:
        """As `bucket_gradients`."""
        exchange = self._exchange(bucket.members[0], bucket.inner, bucket.owners[0])
        if exchange is None:
            return bucket_gradients(bucket, self.source, self.compression.topology, live)
        if is_low_rank(exchange.compressor):
            return self._low_rank_rows(exchange, bucket)
        return self._cast_rows(exchange, bucket)

    def _exchange(self, variable: int, k: int, owner: Coordinate) -> Exchange | None:
        """In which exchange a gradient's part travels to an owner; None as it is."""
        found = self._of.get((variable, k), [])
        return next((e for e in found if e.how != "one" or e.root == owner), None)

    def _device(self, exchange: Exchange, s: int) -> str:
        return self.compression.devices[s][exchange.inner]

    def _each(self, exchange: Exchange, function: Part) -> dict[int, Any]:
        """Calls a function for every slice that takes part, on its device."""
        found = {}
        for s in exchange.slices:
            with tf.device(self._device(exchange, s)):
                found[s] = function(s)
        return found

    def _at_root(self, exchange: Exchange, function: Callable[[], Any]) -> Any:
        with tf.device(self.compression.topology.device(exchange.root)):
            return function()

    def _vectors(self, exchange: Exchange) -> dict[int, Any]:
        """By slice, the members' gradients as one vector."""
        at = lambda s, v: self.source.local(v, (s, exchange.inner))  # noqa: E731
        return self._each(exchange, lambda s: flat([at(s, v) for v in exchange.members]))

    # -- casts

    def _cast(self, exchange: Exchange, tensors: Mapping[int, Any]) -> tuple[dict[int, Any], Any]:
        """By slice, its tensor in 16 bits; and the scale at the root, None for bfloat16."""
        if exchange.compressor == "bf16":
            return self._each(exchange, lambda s: compressors.to_bf16(tensors[s])), None
        largest = self._each(exchange, lambda s: compressors.largest_finite(tensors[s]))
        scale = self._at_root(
            exchange,
            lambda: compressors.fp16_scale(
                tf.reduce_max(tf.stack(list(largest.values()))), len(tensors)
            ),
        )
        return self._each(exchange, lambda s: compressors.to_fp16(tensors[s], scale)), scale

    def _cast_rows(self, exchange: Exchange, bucket: Bucket) -> list[Any]:
        """A bucket's vectors, which travel in 16 bits; owners add in full precision."""

        def rows(s: int) -> Any:
            return bucket.matrix(
                [self.source.local(v, (s, exchange.inner)) for v in bucket.members]
            )

        matrices = self._each(exchange, rows)
        dtype = matrices[exchange.slices[0]].dtype
        messages, scale = self._cast(exchange, matrices)
        cut = self._each(exchange, lambda s: tf.unstack(messages[s], len(bucket.owners)))
        vectors = []
        for n, owner in enumerate(bucket.owners):
            with tf.device(self.compression.topology.device(owner)):
                vectors.append(add([widened(parts[n], scale, dtype) for parts in cut.values()]))
        return vectors

    def _cast_to_one(self, exchange: Exchange, unit: UpdateUnit) -> Any:
        """An owner's part, on the device in scope."""
        (variable,) = exchange.members
        index = None
        if unit.shard is not None:
            placement = self.compression.placements[variable]
            base = placement.inner_index(exchange.inner)
            index = relative(unit.index(placement), base)

        def part(s: int) -> Any:
            gradient = self.source.local(variable, (s, exchange.inner))
            return gradient if index is None else gradient[index]

        parts = self._each(exchange, part)
        messages, scale = self._cast(exchange, parts)
        dtype = parts[exchange.slices[0]].dtype
        total = add([widened(m, scale, dtype) for m in messages.values()])
        return total

    def _cast_to_all(self, exchange: Exchange) -> dict[int, list[Any]]:
        """By slice, the members' sums, which travelled in 16 bits both ways."""
        vectors = self._vectors(exchange)
        dtype = vectors[exchange.slices[0]].dtype
        messages, scale = self._cast(exchange, vectors)

        def total() -> Any:
            wide = add([widened(m, scale, dtype) for m in messages.values()])
            return to_16_bits(wide, exchange, scale)

        back = self._at_root(exchange, total)
        return self._each(
            exchange, lambda s: unflat(widened(tf.identity(back), scale, dtype), exchange.shapes)
        )

    # -- low rank

    def _part(self, exchange: Exchange, unit: UpdateUnit) -> Any:
        """A unit's part of a sum; made where the exchange ends, in the slice that owns the unit."""
        if exchange.how == "one" and not is_low_rank(exchange.compressor):
            return self._cast_to_one(exchange, unit)
        s, position = unit.owner[0], exchange.members.index(unit.variable)
        with tf.device(self._device(exchange, s)):
            if not is_low_rank(exchange.compressor):
                if exchange not in self._found:
                    self._found[exchange] = self._cast_to_all(exchange)
                return self._found[exchange][s][position]
            placement = self.compression.placements[unit.variable]
            index = None
            if unit.shard is not None:
                index = relative(unit.index(placement), placement.inner_index(exchange.inner))
            p, q = self._factors(exchange)[s][position]
            part = compressors.decompressed(p, q, exchange.shapes[position], index)
            return self._scaled(part, exchange)

    def _low_rank_rows(self, exchange: Exchange, bucket: Bucket) -> list[Any]:
        """A bucket: each owner puts its rows together from the factors."""
        factors = self._factors(exchange)
        vectors = []
        for n, (s, _) in enumerate(bucket.owners):
            with tf.device(self._device(exchange, s)):
                rows = []
                for (p, q), shape, dim in zip(factors[s], exchange.shapes, bucket.dims):
                    index = bucket.part(n, shape, dim)
                    rows.append(compressors.decompressed(p, q, shape, index))
                vectors.append(self._scaled(flat(rows), exchange))
        return vectors

    def _scaled(self, gradient: Any, exchange: Exchange) -> Any:
        """As the update expects it: with the loss scale, in the gradients' dtype."""
        like = tf.convert_to_tensor(
            self.source.local(exchange.members[0], (exchange.slices[0], exchange.inner))
        ).dtype
        if self.scale is not None:
            gradient = gradient * tf.cast(self.scale, gradient.dtype)
        return tf.cast(gradient, like)

    def _factors(self, exchange: Exchange) -> dict[int, list[Any]]:
        """By slice, P and Q of every member; see `kdist.optimizer.compressors`."""
        if exchange not in self._found:
            self._found[exchange] = self._exchange_factors(exchange)
        return self._found[exchange]

    def _exchange_factors(self, exchange: Exchange) -> dict[int, list[Any]]:
        k, members = exchange.inner, exchange.members
        states = [self.compression.states[v, k] for v in members]
        rank = states[0].compressor.rank
        sizes = [matrix_shape(shape) for shape in exchange.shapes]

        def matrices(s: int) -> list[Any]:
            return [
                state.matrix(self._unscaled(self.source.local(v, (s, k))), s)
                for v, state in zip(members, states)
            ]

        own = self._each(exchange, matrices)
        sent = self._each(
            exchange,
            lambda s: flat([compressors.left(m, st.start(s)) for m, st in zip(own[s], states)]),
        )

        def bases() -> Any:
            sums = unflat(add(sent.values()), [(rows, rank) for rows, _ in sizes])
            return flat([compressors.orthogonalize(p) for p in sums])

        whole = self._at_root(exchange, bases)
        ps = self._each(
            exchange, lambda s: unflat(tf.identity(whole), [(rows, rank) for rows, _ in sizes])
        )
        rights = self._each(
            exchange, lambda s: [compressors.right(m, p) for m, p in zip(own[s], ps[s])]
        )
        sent = self._each(exchange, lambda s: flat(rights[s]))
        total = self._at_root(exchange, lambda: add(sent.values()))
        qs = self._each(
            exchange, lambda s: unflat(tf.identity(total), [(cols, rank) for _, cols in sizes])
        )
        self._each(exchange, lambda s: self._keep(exchange, s, own[s], ps[s], rights[s], qs[s]))
        return {s: list(zip(ps[s], qs[s])) for s in exchange.slices}

    def _unscaled(self, gradient: Any) -> Any:
        matrix = compressors.as_matrix(gradient)
        return matrix if self.scale is None else matrix / tf.cast(self.scale, matrix.dtype)

    def _keep(
        self, exchange: Exchange, s: int, own: list, ps: list, rights: list, qs: list
    ) -> None:
        """Notes what a slice keeps for the next step."""
        device = self._device(exchange, s)
        for n, v in enumerate(exchange.members):
            state = self.compression.states[v, exchange.inner]
            if state.q:
                self._updates.append((device, state.q[s], qs[n]))
            if state.steps:
                self._updates.append((device, state.steps[s], state.steps[s] + 1))
            if state.errors:
                error = compressors.residual(own[n], ps[n], rights[n])
                self._updates.append((device, state.errors[s], error))
                # Until then gradients are in use; it needs the factors, and so those of all.
                self.last_uses.append(error)


def bucket_vectors(
    bucket: Bucket, source: GradientSource, topology: Topology, live: Container[int] | None = None
) -> list[Any]:
    """As `bucket_gradients`, for any source."""
    if isinstance(source, CompressedGradients):
        return source.bucket(bucket, live)
    return bucket_gradients(bucket, source, topology, live)


def to_16_bits(wide: Any, exchange: Exchange, scale: Any) -> Any:
    """A tensor as it travels."""
    if exchange.compressor == "bf16":
        return compressors.to_bf16(wide)
    return compressors.to_fp16(wide, scale)


def widened(message: Any, scale: Any, dtype: Any) -> Any:
    """The reverse, on the device in scope."""
    if scale is None:
        return tf.cast(message, dtype)
    return compressors.from_fp16(message, scale, dtype)


def add(parts: Iterable[Any]) -> Any:
    """The sum."""
    tensors = list(parts)
    return tf.add_n(tensors) if len(tensors) > 1 else tf.identity(tensors[0])
