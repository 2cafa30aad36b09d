"""Programs that XLA compiles where it can, and nobody asked for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist._compat import xla_clusters


class OrWithoutXla:
    """A function that XLA compiles, or TensorFlow runs if there are operations that XLA lacks.

    Args:
        compiled: A `tf.function` with `jit_compile=True`.
        make_plain: Makes the same without it.
        tell: Takes a line about what XLA lacks.
    """

    def __init__(
        self, compiled: Any, make_plain: Callable[[], Any], tell: Callable[[str], None]
    ) -> None:
        self._compiled, self._make_plain, self._tell = compiled, make_plain, tell
        self._known: list[Any] = []
        self._plain: Any = None

    def __call__(self, *args: Any) -> Any:
        """Calls the one or the other."""
        return self._chosen(args)(*args)

    def get_concrete_function(self, *args: Any) -> Any:
        """See `tf.function`."""
        return self._chosen(args).get_concrete_function(*args)

    def _chosen(self, args: Sequence[Any]) -> Any:
        if self._plain is not None:
            return self._plain
        concrete = self._compiled.get_concrete_function(*args)
        if any(one is concrete for one in self._known):
            return self._compiled
        if unable := xla_clusters.not_compiled(concrete.graph):
            self._tell(
                f"XLA cannot compile {', '.join(unable)}. Keras chose it, as on every machine with "
                "a GPU; these steps run without it. Compile with jit_compile=False to choose that."
            )
            self._plain = self._make_plain()
            return self._plain
        self._known.append(concrete)
        return self._compiled
