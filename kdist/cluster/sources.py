"""Where a process learns its place: what launchers and schedulers leave in the environment.

Each reader takes the environment and returns a place, or None where its variables are not there. A
source that says a part only is an error, never a guess.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdist._compat import ray_train
from kdist.cluster.host_list import expanded, host_file
from kdist.cluster.place import Place, joined_address, port_of

Environment = Mapping[str, str]
TOKEN = "KDIST_TOKEN"
ADDRESS = "KDIST_ADDRESS"
_KDIST = ("KDIST_COORDINATOR", "KDIST_NUM_PROCESSES", "KDIST_PROCESS_ID")
_KUBERNETES = "JOB_COMPLETION_INDEX"
_HERE = "127.0.0.1"


def of_kdist(environment: Environment) -> Place | None:
    """KDIST_COORDINATOR, KDIST_NUM_PROCESSES, KDIST_PROCESS_ID: what kdist's launcher sets.

    In an indexed job of Kubernetes the manifest gives the first two, and the job the number.
    """
    coordinator, count, process = _KDIST
    given = {name: environment[name] for name in _KDIST if environment.get(name)}
    if not given:
        return None
    source = "KDIST_*"
    if process not in given and environment.get(_KUBERNETES):
        given[process], source = environment[_KUBERNETES], f"KDIST_* and {_KUBERNETES}"
    _check_all("KDIST_*", given, _KDIST)
    return Place(number(given, process), number(given, count), given[coordinator], source)


def of_kubernetes(environment: Environment) -> Place | None:
    """An indexed job alone: it says which process this is, and not how many, nor where."""
    if not environment.get(_KUBERNETES) or any(environment.get(name) for name in _KDIST):
        return None
    raise ValueError(
        "An indexed job of Kubernetes says which process this is, and not how many there are nor "
        "where they meet. Set KDIST_COORDINATOR and KDIST_NUM_PROCESSES in its manifest, as in "
        f"examples/cluster/. Received: {_KUBERNETES}={environment[_KUBERNETES]!r}"
    )


def of_tf_config(environment: Environment) -> Place | None:
    """TF_CONFIG, as `tf.distribute` reads it: `chief`, then `worker` of its cluster."""
    text = environment.get("TF_CONFIG", "")
    config = _json("TF_CONFIG", text) if text.strip() else {}
    if not config.get("cluster"):
        return None
    jobs, task = config["cluster"], config.get("task", {})
    strangers = sorted(set(jobs) - {"chief", "worker"})
    if strangers or task.get("type") not in jobs or "index" not in task:
        raise ValueError(
            "TF_CONFIG has a cluster of 'worker', maybe 'chief', and the type and index of this "
            "task; kdist has no parameter servers and evaluates in the processes that train. "
            f"Received: TF_CONFIG={text}"
        )
    addresses = [*jobs.get("chief", []), *jobs.get("worker", [])]
    before = len(jobs.get("chief", [])) if task["type"] == "worker" else 0
    process = before + int(task["index"])
    own = addresses[process] if 0 < process < len(addresses) else None
    return Place(process, len(addresses), addresses[0], "TF_CONFIG", address=own)


def of_slurm(environment: Environment) -> Place | None:
    """A step that `srun` started; a batch script or a shell outside of one is a process alone."""
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    given = {name: environment[name] for name in names if environment.get(name)}
    if names[0] not in given:
        return None
    _check_all("Slurm", given, names)
    job = f"slurm-{given[names[3]]}.{environment.get('SLURM_STEP_ID', '0')}"
    first = expanded(given[names[2]])[0]
    return Place(
        number(given, names[1]),
        number(given, names[0]),
        joined_address(first, port_of(job)),
        "Slurm",
        token=job,
    )


def of_mpi(environment: Environment) -> Place | None:
    """Open MPI's or PMI's variables; they lack addresses, which HOST_FILE gives."""
    for rank, size, local, job in (
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
            "PMIX_NAMESPACE",
        ),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "PMI_JOBID"),
    ):
        given = {name: environment[name] for name in (rank, size) if environment.get(name)}
        if not given:
            continue
        _check_all("MPI", given, (rank, size))
        name = environment.get(job, "mpi")
        if path := environment.get("HOST_FILE"):
            hosts = host_file(Path(path).read_text(encoding="utf-8"))
            slots = sum(count for _, count in hosts)
            if not hosts or slots < number(given, size):
                raise ValueError(
                    f"HOST_FILE has a slot for each process. Received: {slots} slots in {path}, "
                    f"{size}={given[size]}"
                )
            first = hosts[0][0]
        elif environment.get(local) == given[size]:
            first = _HERE
        else:
            raise ValueError(
                "MPI's variables do not say on which machine process 0 is. Set HOST_FILE to the "
                "path of the file of hosts ('host slots=n' a line), or KDIST_COORDINATOR, "
                f"KDIST_NUM_PROCESSES and KDIST_PROCESS_ID. Received: {given}, "
                f"{local}={environment.get(local)!r}"
            )
        coordinator = joined_address(first, port_of(name))
        return Place(number(given, rank), number(given, size), coordinator, "MPI", token=name)
    return None


def of_ray(environment: Environment) -> Place | None:
    """A worker of Ray Train: `kdist.ray.Trainer` says KDIST_*, other trainers say nothing."""
    if ray_train.workers() < 2 or environment.get(_KDIST[0]):
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
    _check_all("torchrun", given, names)
    taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = joined_address(given["MASTER_ADDR"], number(given, "MASTER_PORT") + taken)
    job = environment.get("TORCHELASTIC_RUN_ID", "")
    process, count = number(given, "RANK"), number(given, "WORLD_SIZE")
    return Place(process, count, address, "torchrun", token=job)


def of_rank_table(environment: Environment) -> Place | None:
    """RANK_TABLE_FILE: JSON with servers, their devices and the rank of each; RANK_ID is this one.

    ```json
    {"version": "1.0", "status": "completed", "server_count": "1", "server_list": [
      {"server_id": "10.0.0.1", "device": [{"device_id": "0", "rank_id": "0"}, ...]}]}
    ```
    """
    path = environment.get("RANK_TABLE_FILE")
    if not path:
        return None
    _check_all("RANK_TABLE_FILE", environment, ("RANK_ID",))
    text = Path(path).read_text(encoding="utf-8")
    try:
        servers = {
            int(device["rank_id"]): (str(server["server_id"]), str(device["device_id"]))
            for server in json.loads(text)["server_list"]
            for device in server["device"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            "A rank table has 'server_list', servers with 'server_id' and 'device', devices with "
            f"'device_id' and 'rank_id'. Received: {path}, {type(error).__name__}: {error}"
        ) from error
    rank, count = number(environment, "RANK_ID"), len(servers)
    said = {
        "RANK_SIZE": str(count),
        "DEVICE_ID": servers.get(rank, ("", None))[1],
    }
    wrong = {n: environment[n] for n, v in said.items() if environment.get(n) not in (None, "", v)}
    if sorted(servers) != list(range(count)) or wrong or rank >= count:
        raise ValueError(
            "A rank table has the ranks from 0 on, once each, and agrees with RANK_ID, RANK_SIZE "
            f"and DEVICE_ID. Received: ranks {sorted(servers)} in {path}, RANK_ID={rank}, {wrong}"
        )
    coordinator = joined_address(servers[0][0], port_of(text))
    return Place(rank, count, coordinator, "RANK_TABLE_FILE", token=str(port_of(text)))


def of_keras(environment: Environment) -> Place | None:
    """KERAS_DISTRIBUTION_*, which `keras.distribution.initialize` reads on JAX."""
    names = tuple(
        f"KERAS_DISTRIBUTION_{end}" for end in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
    )
    given = {name: environment[name] for name in names if environment.get(name)}
    if not given:
        return None
    _check_all("KERAS_DISTRIBUTION_*", given, names)
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
class Source:
    """What can say a process's place.

    Attributes:
        name: For messages.
        read: See the module.
        near: Whether it is nearer to the process than a scheduler, whose place it may narrow.
    """

    name: str
    read: Callable[[Environment], Place | None]
    near: bool


SOURCES = (
    Source("KDIST_*", of_kdist, near=True),
    Source("TF_CONFIG", of_tf_config, near=True),
    Source("Ray Train", of_ray, near=True),
    Source("torchrun", of_torchrun, near=True),
    Source("KERAS_DISTRIBUTION_*", of_keras, near=True),
    Source("Slurm", of_slurm, near=False),
    Source("MPI", of_mpi, near=False),
    Source("Kubernetes", of_kubernetes, near=False),
    Source("RANK_TABLE_FILE", of_rank_table, near=False),
)
"""In the order in which they are asked."""


def find(
    environment: Environment,
    sources: Sequence[Source] = SOURCES,
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


def _is_there(source: Source, environment: Environment) -> bool:
    """Whether a source that is not asked says anything, a part or a contradiction included."""
    try:
        return source.read(environment) is not None
    except (ValueError, OSError):
        return True


def _agreed(sources: Sequence[Source], environment: Environment) -> Place | None:
    """The first place that is said; all others must be the same process of as many."""
    found = [place for one in sources if (place := one.read(environment)) is not None]
    for other in found[1:]:
        if (other.process, other.count) != (found[0].process, found[0].count):
            raise ValueError(
                "Two sources tell this process different places. Unset the variables of one. "
                f"Received: process {found[0].process} of {found[0].count} from "
                f"{found[0].source}, process {other.process} of {other.count} from {other.source}"
            )
    return found[0] if found else None


def _check_all(source: str, given: Environment, names: Sequence[str]) -> None:
    missing = [name for name in names if not given.get(name)]
    if missing:
        there = {name: given[name] for name in names if given.get(name)}
        raise ValueError(
            f"{source} says a part of this process's place only. Set {', '.join(missing)} too, or "
            f"unset the others. Received: {there}"
        )


def number(given: Environment, name: str) -> int:
    """The integer that a variable says."""
    try:
        return int(given[name])
    except ValueError:
        raise ValueError(f"{name} is an integer. Received: {given[name]!r}") from None


def _json(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is JSON. Received: {text!r}, {error}") from error
    return found if isinstance(found, dict) else {}
