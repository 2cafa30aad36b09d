"""Where a process learns its place from what started many at once: Slurm, MPI, Kubernetes, tables.

See `kdist.cluster.sources`, which asks these where nothing nearer to the process says anything.
"""

from __future__ import annotations

import json

from kdist.cluster.host_list import expanded, host_file
from kdist.cluster.place import Place, joined_address, port_of
from kdist.cluster.variables import (
    HERE,
    INDEX,
    KDIST,
    Environment,
    Rank,
    check_all,
    content,
    number,
)

_STEP = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    "PMI_RANK": ("PMI_SIZE", "MPI_LOCALNRANKS", "PMI_JOBID"),
}
"""For a variable with the rank, those with the size, the size on this machine, the job's name."""
_PMIX = "PMIX_RANK"
_TABLE = ("RANK_TABLE_FILE", "RANK_ID", "RANK_SIZE")


def of_kubernetes(environment: Environment) -> Place | None:
    """An indexed job alone: it says which process this is, and not how many, nor where."""
    if not environment.get(INDEX) or any(environment.get(name) for name in KDIST):
        return None
    raise ValueError(
        "An indexed job of Kubernetes says which process this is, and not how many there are nor "
        "where they meet. Set KDIST_COORDINATOR and KDIST_NUM_PROCESSES in its manifest, as in "
        f"examples/cluster/. Received: {INDEX}={environment[INDEX]!r}"
    )


def of_slurm(environment: Environment) -> Place | None:
    """A step that `srun` started; a batch script or a shell outside of one is a process alone."""
    count, process, nodes, number_of_job = _STEP
    given = {name: environment[name] for name in _STEP if environment.get(name)}
    if count not in given:
        return None
    check_all("Slurm", given, _STEP)
    if daemons_of_slurm(environment):
        return None
    job = f"slurm-{given[number_of_job]}.{environment.get('SLURM_STEP_ID', '0')}"
    address = joined_address(expanded(given[nodes])[0], port_of(job))
    return Place(number(given, process), number(given, count), address, "Slurm", token=job)


def daemons_of_slurm(environment: Environment) -> bool:
    """Whether the step is of daemons, one a node, by which `mpirun` has started this process."""
    tasks, _, nodes, _ = (environment.get(name, "") for name in _STEP)
    for rank, (size, local, _) in _MPIRUN.items():
        # `srun --mpi=pmi2` sets PMI_* too, without the size on this machine.
        mine = rank.startswith("OMPI") or environment.get(local)
        if tasks and mine and environment.get(rank) and environment.get(size):
            one_a_node = number(environment, _STEP[0]) == len(expanded(nodes))
            return one_a_node and int(tasks) <= number(environment, size)
    return False


def of_mpi(environment: Environment) -> Place | Rank | None:
    """Open MPI's, PMI's or PMIx's variables; they lack addresses, which HOST_FILE gives."""
    for rank, (size, local, job) in _MPIRUN.items():
        given = {name: environment[name] for name in (rank, size) if environment.get(name)}
        if not given:
            continue
        check_all("MPI", given, (rank, size))
        process, count = number(given, rank), number(given, size)
        if environment.get("HOST_FILE"):
            first = _first_host(environment, size, count)
        elif environment.get(local) == given[size]:
            first = HERE
        else:
            return Rank(
                process,
                count,
                "MPI",
                "MPI's variables do not say on which machine process 0 is. Set HOST_FILE to the "
                "path of the file of hosts ('host slots=n' a line), or KDIST_COORDINATOR, "
                f"KDIST_NUM_PROCESSES and KDIST_PROCESS_ID. Received: {given}, "
                f"{local}={environment.get(local)!r}",
            )
        name = environment.get(job, "mpi")
        return Place(process, count, joined_address(first, port_of(name)), "MPI", token=name)
    if not environment.get(_PMIX):
        return None
    return Rank(
        number(environment, _PMIX),
        None,
        "MPI",
        "PMIx says which process this is, and not how many there are nor where they meet. Set "
        "KDIST_COORDINATOR, KDIST_NUM_PROCESSES and KDIST_PROCESS_ID. "
        f"Received: {_PMIX}={environment[_PMIX]!r}",
    )


def _first_host(environment: Environment, size: str, count: int) -> str:
    """The machine of process 0, by a file of hosts."""
    hosts = host_file(content(environment, "HOST_FILE"))
    slots = sum(number for _, number in hosts)
    if not hosts or slots < count:
        raise ValueError(
            f"HOST_FILE has a slot for each process. Received: {slots} slots in "
            f"{environment['HOST_FILE']}, {size}={count}"
        )
    return hosts[0][0]


def of_rank_table(environment: Environment) -> Place | None:
    """RANK_TABLE_FILE: JSON with servers, their devices and the rank of each; RANK_ID is this one.

    ```json
    {"version": "1.0", "status": "completed", "server_count": "1", "server_list": [
      {"server_id": "10.0.0.1", "device": [{"device_id": "0", "rank_id": "0"}, ...]}]}
    ```
    """
    given = {name: environment[name] for name in _TABLE if environment.get(name)}
    if not given or given == {"RANK_SIZE": "1"} or given == {"RANK_ID": "0", "RANK_SIZE": "1"}:
        return None  # there is no table of one
    check_all("A rank table", given, _TABLE[:2])
    path = given["RANK_TABLE_FILE"]
    text = content(given, "RANK_TABLE_FILE")
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
