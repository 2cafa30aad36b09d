"""Which array of a checkpoint belongs to which variable of a model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kdist.checkpoint.manifest import CheckpointError, SavedArray

Wanted = tuple[str, tuple[int, ...]]
"""Path and shape of a variable."""


def match(saved: Sequence[SavedArray], wanted: Sequence[Wanted], what: str) -> list[SavedArray]:
    """Finds the array of each variable.

    By path, where paths are unique and the same ones. Otherwise in order, as Keras saves weights,
    if paths differ in nothing but the numbers that Keras gives to layers without a name (a second
    model of a process has `dense_2` where the first has `dense`), and in what stands before: a
    model that was loaded from a file has `dense` where one that was built has `sequential/dense`.

    Args:
        saved: The arrays of a group.
        wanted: The variables of the model, in Keras's order.
        what: Of the group, for messages.

    Returns:
        One array per variable.

    Raises:
        CheckpointError: The checkpoint is of another model; says what differs.
    """
    by_path = {one.path: one for one in saved}
    paths = [path for path, _ in wanted]
    if len(by_path) == len(saved) and sorted(by_path) == sorted(paths):
        found = [by_path[path] for path in paths]
    elif len(saved) == len(paths) and all(
        _alike(one.path, path, what) for one, path in zip(saved, paths)
    ):
        found = list(saved)
    else:
        raise CheckpointError(_difference([one.path for one in saved], paths, what))
    for one, (path, shape) in zip(found, wanted):
        if one.shape != shape:
            raise CheckpointError(
                f"A variable of the {what} has another shape in the checkpoint. Build the model as "
                f"it was when it was saved. Received: {path!r} of shape {shape}, saved as "
                f"{one.path!r} of shape {one.shape}"
            )
    return found


_ADAPTED = ("/lora_", "/kernel_scale", "/embeddings_scale", "amax_history")
"""In names of weights that `enable_lora` and `quantize` give a layer."""


def _alike(one: str, other: str, what: str) -> bool:
    """Whether two paths may be of the same variable, as far as Keras's ways to name it go.

    An optimizer names its slots after the weights, and itself after the loss scale around it.
    """
    (*before, a), (*before_other, b) = (_parts(path, what) for path in (one, other))
    short, long = sorted((a, b), key=len)
    between = "_" if what.startswith("optimizer") else "/"
    return before == before_other and (short == long or long.endswith(between + short))


def _parts(path: str, what: str) -> list[str]:
    """Of an optimizer's variable, the optimizer's own name and the variable's; else all in one."""
    plain = _plain(path)
    return plain.split("/")[-2:] if what.startswith("optimizer") else [plain]


def _plain(path: str) -> str:
    """A path without the numbers of layers that have no name of their own."""
    return re.sub(r"_\d+(?=[/_]|$)", "", path)


def _difference(saved: Sequence[str], wanted: Sequence[str], what: str) -> str:
    only_saved, only_wanted = _only(saved, wanted), _only(wanted, saved)
    adapted = any(one in path for path in (*only_saved, *only_wanted) for one in _ADAPTED)
    advice = " Call enable_lora, and quantize, on the layers that had it." if adapted else ""
    if what.startswith("optimizer") and _of_other_weights(only_saved, only_wanted, wanted):
        where = "in the checkpoint" if only_saved else "now"
        advice = (
            f" More weights are trained {where}: set `trainable` of the layers as it was when the "
            "model that was saved was compiled, compile, restore, and change it after that."
        )
    return (
        f"The checkpoint's {what} is another one. Build the model, and compile it with the "
        f"optimizer, that were saved.{advice} Received: {len(wanted)} variables, {len(saved)} in "
        f"the checkpoint; only in the model: {only_wanted[:3]}; only saved: {only_saved[:3]}"
    )


def _only(some: Sequence[str], others: Sequence[str]) -> list[str]:
    """Paths that others have not, numbers aside; if that is none, those that differ at all."""
    plain = {_plain(path) for path in others}
    found = [path for path in some if _plain(path) not in plain]
    if found or {_plain(path) for path in some} != plain:
        return found
    return [path for path in some if path not in set(others)]


def _of_other_weights(
    only_saved: Sequence[str], only_wanted: Sequence[str], wanted: Sequence[str]
) -> bool:
    """Whether an optimizer's state is of more weights, of the same kind, on one side alone."""
    both = {_weight(path) for path in wanted if path not in set(only_wanted)} - {""}
    extra = {_weight(path) for path in (*only_saved, *only_wanted)}
    return bool(both) and bool(only_saved) != bool(only_wanted) and not both & extra


def _weight(path: str) -> str:
    """What a slot is of: its path without the slot's own name; "" for what is of all weights."""
    name = _plain(path).rpartition("/")[2]
    return "" if name in ("iteration", "learning_rate") else name.rpartition("_")[0]
