"""Where a process learns its place: what launchers and schedulers leave in the environment.

Each reader takes the environment and returns a place, or None where its variables are not there. A
source that says a part only is an error, never a guess; one that lacks an address alone may leave
that to another.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from kdist._compat import ray_train
from kdist.cluster.place import Place, joined_address, port_of, split_address
from kdist.cluster.schedulers import (
    daemons_of_slurm,
    of_kubernetes,
    of_mpi,
    of_rank_table,
    of_slurm,
)
from kdist.cluster.variables import HERE, INDEX, KDIST, Environment, Rank, check_all, number

TOKEN = "KDIST_TOKEN"
ADDRESS = "KDIST_ADDRESS"


def of_kdist(environment: Environment) -> Place | None:
    """KDIST_COORDINATOR, KDIST_NUM_PROCESSES, KDIST_PROCESS_ID: what kdist's launcher sets.

    In an indexed job of Kubernetes the manifest gives the first two, and the job the number.
    """
    coordinator, count, process = KDIST
    given = {name: environment[name] for name in KDIST if environment.get(name)}
    if not given:
        return None
    source = "KDIST_*"
    if set(given) == {count} and number(given, count) == 1:
        return Place(0, 1, joined_address(HERE, port_of("alone")), source)
    if process not in given and environment.get(INDEX):
        given[process], source = environment[INDEX], f"KDIST_* and {INDEX}"
    check_all("KDIST_*", given, KDIST)
    return Place(number(given, process), number(given, count), given[coordinator], source)


def of_tf_config(environment: Environment) -> Place | None:
    """TF_CONFIG, as `tf.distribute` reads it: `chief`, then `worker` of its cluster."""
    text = environment.get("TF_CONFIG", "")
    config = _json(text) if text.strip() else {}
    if not config.get("cluster"):
        return None
    jobs, task = config["cluster"], config.get("task", {})
    well_formed = isinstance(task, dict) and isinstance(jobs, dict)
    if well_formed:
        lists = all(_is_list_of_texts(one) for one in jobs.values()) and any(jobs.values())
        known = not set(jobs) - {"chief", "worker"} and task.get("type") in jobs
        well_formed = lists and known and str(task.get("index", "")).isdecimal()
    if not well_formed:
        raise ValueError(
            "TF_CONFIG has a cluster of 'worker', maybe 'chief', and the type and index of this "
            "task; kdist has no parameter servers and evaluates in the processes that train. "
            f"Received: TF_CONFIG={text}"
        )
    addresses = [*jobs.get("chief", []), *jobs.get("worker", [])]
    for address in addresses:
        split_address(address, "TF_CONFIG")
    kind, index = task["type"], int(task["index"])
    if index >= len(jobs[kind]):
        raise ValueError(
            "Tasks of a kind are numbered from 0 to their number less one. Received: "
            f"{kind} {index} of {len(jobs[kind])}, from TF_CONFIG"
        )
    process = index + (len(jobs.get("chief", [])) if kind == "worker" else 0)
    own = addresses[process] if process else None
    return Place(process, len(addresses), addresses[0], "TF_CONFIG", address=own)


def of_ray(environment: Environment) -> Place | None:
    """A worker of Ray Train: `kdist.ray.Trainer` says KDIST_*, other trainers say nothing."""
    if ray_train.workers() < 2 or environment.get(KDIST[0]):
        return None
    raise ValueError(
        "Ray Train's workers become one program, and end as one, with kdist.ray.Trainer in place "
        "of the trainer that started them. "
        f"Received: {ray_train.workers()} workers of another trainer"
    )


def of_torchrun(environment: Environment) -> Place | None:
    """RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. The last is of torchrun's own store: one more."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = {name: environment[name] for name in names if environment.get(name)}
    if not {"RANK", "WORLD_SIZE"} & set(given):
        return None
    check_all("torchrun", given, names)
    taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = joined_address(given["MASTER_ADDR"], number(given, "MASTER_PORT") + taken)
    job = environment.get("TORCHELASTIC_RUN_ID", "")
    process, count = number(given, "RANK"), number(given, "WORLD_SIZE")
    return Place(process, count, address, "torchrun", token=job)


def of_keras(environment: Environment) -> Place | None:
    """KERAS_DISTRIBUTION_*, which `keras.distribution.initialize` reads on JAX."""
    names = tuple(
        f"KERAS_DISTRIBUTION_{end}" for end in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
    )
    given = {name: environment[name] for name in names if environment.get(name)}
    if not given:
        return None
    check_all("KERAS_DISTRIBUTION_*", given, names)
    addresses = [one.strip() for one in given[names[0]].split(",")]
    count, process = number(given, names[1]), number(given, names[2])
    if len(addresses) not in (1, count):
        raise ValueError(
            "KERAS_DISTRIBUTION_JOB_ADDRESSES has the address of process 0, or one of each. "
            f"Received: {len(addresses)} addresses for {count} processes"
        )
    own = addresses[process] if 0 < process < len(addresses) else None
    return Place(process, count, addresses[0], "KERAS_DISTRIBUTION_*", address=own)


@dataclasses.dataclass(frozen=True)
class PlaceSource:
    """What can say a process's place.

    Attributes:
        name: For messages.
        read: See the module.
        near: Whether it is nearer to the process than a scheduler, whose place it may narrow.
    """

    name: str
    read: Callable[[Environment], Place | Rank | None]
    near: bool


SOURCES = (
    PlaceSource("KDIST_*", of_kdist, near=True),
    PlaceSource("TF_CONFIG", of_tf_config, near=True),
    PlaceSource("Ray Train", of_ray, near=True),
    PlaceSource("torchrun", of_torchrun, near=True),
    PlaceSource("KERAS_DISTRIBUTION_*", of_keras, near=True),
    PlaceSource("Slurm", of_slurm, near=False),
    PlaceSource("MPI", of_mpi, near=False),
    PlaceSource("Kubernetes", of_kubernetes, near=False),
    PlaceSource("RANK_TABLE_FILE", of_rank_table, near=False),
)
"""In the order in which they are asked."""


def find(
    environment: Environment,
    sources: Sequence[PlaceSource] = SOURCES,
    say: Callable[[str], None] = lambda line: None,
) -> Place | None:
    """The place that the environment gives this process, None where nothing does.

    What is nearer to the process wins over the scheduler around it, which is said. Two that are
    equally near must agree.

    Args:
        environment: Variables, by name.
        sources: Who is asked.
        say: Takes a line for the user.

    Raises:
        ValueError: A source says a part only, or two that are equally near disagree.
    """
    near = _agreed([one for one in sources if one.near], environment)
    far = [one for one in sources if not one.near]
    if near is None:
        found = _agreed(far, environment)
        if found is not None and found.source == "MPI" and daemons_of_slurm(environment):
            say(f"{_said(found)}; the step of Slurm around it is of mpirun's daemons.")
    else:
        found = near
        around = [one.name for one in far if _is_there(one, environment)]
        if around:
            say(
                f"{near.source} says that this is process {near.process} of {near.count}; "
                f"{' and '.join(around)} around it is not asked."
            )
    if found is None:
        return None
    changes: dict[str, Any] = {}
    if environment.get(TOKEN):
        changes["token"] = environment[TOKEN]
    if environment.get(ADDRESS):
        changes["address"] = environment[ADDRESS]
    return dataclasses.replace(found, **changes)


def _is_there(source: PlaceSource, environment: Environment) -> bool:
    """Whether a source that is not asked says anything, a part or a contradiction included."""
    try:
        return source.read(environment) is not None
    except (ValueError, OSError):
        return True


def _agreed(sources: Sequence[PlaceSource], environment: Environment) -> Place | None:
    """The first place that is said; all others must be the same process of as many."""
    found = [place for one in sources if (place := one.read(environment)) is not None]
    for number_of_first, first in enumerate(found):
        for other in found[number_of_first + 1 :]:
            counts = {first.count, other.count} - {None}
            if first.process != other.process or len(counts) > 1:
                raise ValueError(
                    "Two sources tell this process different places. Unset the variables of one. "
                    f"Received: {_said(first)}, {_said(other)}"
                )
    for one in found:
        if isinstance(one, Place):
            return one
    if found:
        assert isinstance(found[0], Rank)
        raise ValueError(found[0].lacks)
    return None


def _is_list_of_texts(one: Any) -> bool:
    return isinstance(one, list) and all(isinstance(text, str) for text in one)


def _said(one: Place | Rank) -> str:
    count = "an unknown number" if one.count is None else one.count
    return f"process {one.process} of {count} from {one.source}"


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"TF_CONFIG is JSON. Received: {text!r}, {error}") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"TF_CONFIG is an object of JSON with 'cluster' and 'task'. Received: {text!r}"
        )
    return found
