"""Every use of Ray Train beyond its users' interface; nothing here imports Ray by itself.

Held by `tests/ray/`:

- `DataParallelTrainer`, the base of Ray Train's own trainers, is not exported under `ray.train`.
- The functions of `ray.train` that every worker has to call ask one object of the process, of the
  class `DistributedTrainFnUtils`, which `set_train_fn_utils` puts in place.
- `DataConfig` keeps which datasets are split in an attribute.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

_TRAINER = "ray.train.v2.api.data_parallel_trainer"
_FUNCTIONS = "ray.train.v2._internal.execution.train_fn_utils"
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "report": ({},),
    "barrier": (),
    "broadcast_from_rank_zero": (None,),
    "get_preemption_info": (),
}
"""What all workers of a group have to call, and what those besides the first one call it with."""


def trainer() -> Any:
    """The class `DataParallelTrainer`."""
    return importlib.import_module(_TRAINER).DataParallelTrainer


def workers() -> int:
    """How many workers are in the group of Ray Train that this process is of; 0 for none."""
    functions = sys.modules.get(_FUNCTIONS)
    if functions is None:
        return 0
    try:
        return int(functions.get_train_fn_utils().get_context().get_world_size())
    except RuntimeError:
        return 0


def splits(data_config: Any) -> bool:
    """Whether a `ray.train.DataConfig` gives each worker a part of a dataset."""
    return bool(data_config._datasets_to_split)


def calls_of_all() -> dict[str, Callable[[], object]]:
    """What all workers have to call, by name, as the others call it."""
    functions = importlib.import_module(_FUNCTIONS).get_train_fn_utils()
    return {
        name: lambda name=name, given=given: getattr(functions, name)(*given)  # type: ignore[misc]
        for name, given in _ARGUMENTS.items()
    }


def tell_before(tell: Callable[[str], object]) -> None:
    """From now on, what all workers have to call is told by name before it is called here.

    One such call at a time: a checkpoint may be reported by the thread that wrote it.
    """
    functions = importlib.import_module(_FUNCTIONS)
    lock = threading.RLock()

    def told(name: str) -> Callable[..., Any]:
        def call(self: Any, *given: Any, **named: Any) -> Any:
            with lock:
                tell(name)
                return getattr(functions.DistributedTrainFnUtils, name)(self, *given, **named)

        return call

    kind = type(
        "TellingTrainFnUtils",
        (functions.DistributedTrainFnUtils,),
        {name: told(name) for name in _ARGUMENTS},
    )
    functions.set_train_fn_utils(kind())
