"""Where a process learns its place: each source by the variables that it really sets."""

import json
import re
from pathlib import Path
from typing import Any

from kdist.cluster import sources
from kdist.cluster.place import Place, port_of
from kdist.cluster.sources import SOURCES, find

import pytest

KDIST = {
    "KDIST_COORDINATOR": "10.0.0.1:4000",
    "KDIST_NUM_PROCESSES": "4",
    "KDIST_PROCESS_ID": "3",
}
TF_CONFIG = {
    "TF_CONFIG": json.dumps(
        {
            "cluster": {"worker": ["10.0.0.1:4000", "10.0.0.2:4000"], "chief": ["10.0.0.9:1"]},
            "task": {"type": "worker", "index": 1},
        }
    )
}
SLURM = {
    "SLURM_JOB_ID": "512",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[07-08,12]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node-41@1",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "PMI_JOBID": "kvs_9"}
TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "2",
    "KDIST_COORDINATOR": "train-0.train:4000",
    "KDIST_NUM_PROCESSES": "4",
}
KERAS = {
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.0.0.1:1234,10.0.0.2:2345",
    "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    "KERAS_DISTRIBUTION_PROCESS_ID": "1",
}
TABLE = {
    "version": "1.0",
    "status": "completed",
    "server_count": "2",
    "server_list": [
        {"server_id": "10.1.0.1", "device": [{"device_id": "0", "rank_id": "0"}]},
        {
            "server_id": "10.1.0.2",
            "device": [
                {"device_id": "0", "device_ip": "192.168.1.1", "rank_id": "1"},
                {"device_id": "1", "device_ip": "192.168.1.2", "rank_id": "2"},
            ],
        },
    ],
}

SLURM_PORT = port_of("slurm-512.0")
MPI_PORT = port_of("prterun-node-41@1")


PMI2 = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_JOBID": "512.0", "PMI_FD": "10"}
PMIX = {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.512.0"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (KDIST, (3, 4, "10.0.0.1:4000", "KDIST_*")),
        (TF_CONFIG, (2, 3, "10.0.0.9:1", "TF_CONFIG")),
        (SLURM, (5, 8, f"gpu07:{SLURM_PORT}", "Slurm")),
        (OPEN_MPI, (1, 2, f"127.0.0.1:{MPI_PORT}", "MPI")),
        (PMI, (0, 4, f"127.0.0.1:{port_of('kvs_9')}", "MPI")),
        (TORCHRUN, (1, 2, "10.0.0.1:29501", "torchrun")),
        (SLURM | PMI2, (5, 8, f"gpu07:{SLURM_PORT}", "Slurm")),
        (SLURM | PMIX, (5, 8, f"gpu07:{SLURM_PORT}", "Slurm")),
        (KUBERNETES, (2, 4, "train-0.train:4000", "KDIST_* and JOB_COMPLETION_INDEX")),
        (KERAS, (1, 2, "10.0.0.1:1234", "KERAS_DISTRIBUTION_*")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_source(variables: dict[str, str], place: tuple[Any, ...]) -> None:
    found = find(variables)
    assert found is not None
    assert (found.process, found.count, found.coordinator, found.source) == place


def test_nothing_says_anything() -> None:
    others = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "MASTER_ADDR": "a"}
    assert find({}) is None
    assert find({"TF_CONFIG": "{}"}) is None
    assert find(others) is None, "a batch script outside of srun is a process alone"


def test_a_task_of_tf_config_has_an_address_of_its_own() -> None:
    found = find(TF_CONFIG)
    assert found is not None and found.address == "10.0.0.2:4000"


@pytest.mark.parametrize(("rank", "size"), [(0, "3"), (2, "")])
def test_rank_table(tmp_path: Path, rank: int, size: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE))
    variables = {"RANK_TABLE_FILE": str(path), "RANK_ID": str(rank), "RANK_SIZE": size}
    found = find(variables)
    assert found is not None
    assert (found.process, found.count, found.source) == (rank, 3, "RANK_TABLE_FILE")
    assert found.coordinator.startswith("10.1.0.1:")


@pytest.mark.parametrize("wrong", [{"DEVICE_ID": "0"}, {"RANK_SIZE": "4"}, {"RANK_ID": "7"}])
def test_a_rank_table_that_contradicts(tmp_path: Path, wrong: dict[str, str]) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE))
    with pytest.raises(ValueError, match="agrees with RANK_ID, RANK_SIZE"):
        find({"RANK_TABLE_FILE": str(path), "RANK_ID": "2"} | wrong)


def test_hosts_of_mpi_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# rack 3\nnode-a slots=1\nnode-b slots=1\n")
    variables = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "HOST_FILE": str(path)}
    found = find(variables)
    assert found is not None and found.coordinator == f"node-a:{MPI_PORT}"
    with pytest.raises(ValueError, match="HOST_FILE has a slot for each process"):
        find(variables | {"OMPI_COMM_WORLD_SIZE": "9"})
    with pytest.raises(ValueError, match="Set HOST_FILE to the path"):
        find({name: value for name, value in variables.items() if name != "HOST_FILE"})


PARTS = [
    (KDIST, "KDIST_PROCESS_ID"),
    (SLURM, "SLURM_PROCID"),
    (SLURM, "SLURM_STEP_NODELIST"),
    (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
    (PMI, "PMI_RANK"),
    (TORCHRUN, "MASTER_PORT"),
    (TORCHRUN, "WORLD_SIZE"),
    (KERAS, "KERAS_DISTRIBUTION_PROCESS_ID"),
    ({"RANK_ID": "1", "RANK_SIZE": "4", "DEVICE_ID": "1"}, "RANK_TABLE_FILE"),
    ({"RANK_SIZE": "4"}, "RANK_TABLE_FILE, RANK_ID"),
    ({"RANK_TABLE_FILE": "table.json"}, "RANK_ID"),
]


@pytest.mark.parametrize(("variables", "missing"), PARTS, ids=[name for _, name in PARTS])
def test_a_part_is_an_error_that_names_what_is_missing(
    variables: dict[str, str], missing: str
) -> None:
    rest = {name: value for name, value in variables.items() if name != missing}
    with pytest.raises(ValueError, match=f"Set {missing} too"):
        find(rest)


def test_a_job_of_kubernetes_alone_says_too_little() -> None:
    with pytest.raises(ValueError, match="Set KDIST_COORDINATOR and KDIST_NUM_PROCESSES"):
        find({"JOB_COMPLETION_INDEX": "2"})


@pytest.mark.parametrize("around", [{}, {"JOB_COMPLETION_INDEX": "2"}])
def test_one_process_is_alone_wherever_it_is(around: dict[str, str]) -> None:
    found = find(around | {"KDIST_NUM_PROCESSES": "1"})
    assert found is not None and (found.process, found.count) == (0, 1)


@pytest.mark.parametrize("said", [{"RANK_SIZE": "1"}, {"RANK_ID": "0", "RANK_SIZE": "1"}])
def test_there_is_no_table_of_one(said: dict[str, str]) -> None:
    assert find(said | {"DEVICE_ID": "3"}) is None


@pytest.mark.parametrize(
    "text",
    ["[1]", '"x"', "{", '{"cluster": [1]}', '{"cluster": {"worker": "a:1"}}']
    + [
        json.dumps({"cluster": {"worker": addresses}, "task": task})
        for addresses, task in (
            (["a:1", "b:1"], {"type": "worker", "index": "x"}),
            (["a:1", "b:1"], {"type": "worker", "index": -1}),
            (["a:1", "b:1"], {"type": "worker"}),
            (["a:1", "b:1"], [1]),
            ([], {"type": "worker", "index": 0}),
            ([1, 2], {"type": "worker", "index": 0}),
        )
    ],
)
def test_what_is_no_tf_config(text: str) -> None:
    with pytest.raises(ValueError, match="^TF_CONFIG (has|is) .*Received: "):
        find({"TF_CONFIG": text})


def test_a_task_that_its_cluster_has_not_is_refused() -> None:
    """A second chief was taken for the first worker."""
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    for kind, index in (("chief", 1), ("worker", 2)):
        config = {"cluster": cluster, "task": {"type": kind, "index": index}}
        with pytest.raises(ValueError, match=f"numbered from 0.*{kind} {index} of {index}"):
            find({"TF_CONFIG": json.dumps(config)})


def test_each_process_refuses_an_address_of_any_that_is_none() -> None:
    """Else process 0 would wait for one that has ended."""
    config = {"cluster": {"worker": ["a:1", "b"]}, "task": {"type": "worker", "index": 0}}
    with pytest.raises(ValueError, match="An address is.*Received: 'b', from TF_CONFIG"):
        find({"TF_CONFIG": json.dumps(config)})


@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("RANK_TABLE_FILE", {"RANK_ID": "1"}),
        ("HOST_FILE", OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}),
    ],
)
def test_a_file_that_is_not_there_is_named_by_its_variable(
    name: str, around: dict[str, str], tmp_path: Path
) -> None:
    path = f"{tmp_path}/none"
    with pytest.raises(ValueError, match=f"{name} is the path of a file.*{name}={path!r}"):
        find(around | {name: path})


def test_parameter_servers_are_refused() -> None:
    config = {"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "ps", "index": 0}}
    with pytest.raises(ValueError, match="no parameter servers"):
        find({"TF_CONFIG": json.dumps(config)})


NEAR = {"KDIST_*": KDIST, "TF_CONFIG": TF_CONFIG, "torchrun": TORCHRUN, "KERAS": KERAS}
FAR = {
    "Slurm": SLURM,
    "MPI": OPEN_MPI,
    "Kubernetes": {"JOB_COMPLETION_INDEX": "0"},
    "RANK_TABLE_FILE": {"RANK_TABLE_FILE": "table.json", "RANK_ID": "0"},
}


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("near", NEAR)
def test_what_is_nearer_wins_with_one_line(near: str, far: str) -> None:
    said: list[str] = []
    found = find(NEAR[near] | FAR[far], say=said.append)
    alone = find(NEAR[near])
    assert found == alone
    if (near, far) != ("KDIST_*", "Kubernetes"):  # one and the same source
        assert len(said) == 1 and far in said[0] and alone.source in said[0]


@pytest.mark.parametrize(
    "both",
    [
        *(KDIST | TORCHRUN, TF_CONFIG | KERAS, SLURM | OPEN_MPI, TORCHRUN | TF_CONFIG),
        SLURM | PMI2 | {"PMI_RANK": "4"},
        SLURM | PMI2 | {"PMI_SIZE": "9"},
        SLURM | PMIX | {"PMIX_RANK": "4"},
    ],
)
def test_two_that_are_equally_near_and_disagree(both: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="Two sources tell this process different places") as found:
        find(both)
    named = [one.name for one in SOURCES if re.search(re.escape(one.name), str(found.value))]
    assert len(named) == 2


DAEMONS = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node-41@1",
}


@pytest.mark.parametrize(
    "step",
    [
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n2"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n[1-2]"},
    ],
)
@pytest.mark.parametrize("hydra", [False, True])
def test_mpirun_inside_of_slurm(step: dict[str, str], hydra: bool, tmp_path: Path) -> None:
    """The step around a process is of the daemon on its node."""
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    mpi = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"} if hydra else DAEMONS
    variables = SLURM | step | mpi | {"HOST_FILE": str(tmp_path / "hosts")}
    said: list[str] = []
    found = find(variables, say=said.append)
    assert found is not None and (found.process, found.count, found.source) == (3, 4, "MPI")
    assert found.coordinator.startswith("n1:")
    assert said == ["process 3 of 4 from MPI; the step of Slurm around it is of mpirun's daemons."]
    with pytest.raises(ValueError, match="Set HOST_FILE to the path"):
        find({name: value for name, value in variables.items() if name != "HOST_FILE"})


def test_a_rank_alone_is_too_little() -> None:
    with pytest.raises(ValueError, match="PMIx says which process this is, and not how many"):
        find(PMIX)


@pytest.mark.parametrize("far", ["Slurm", "Kubernetes"])
def test_ray_inside_of_a_scheduler(far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kdist.ray.Trainer` sets KDIST_*; other trainers say nothing, which is an error there too."""
    monkeypatch.setattr(sources.ray_train, "workers", lambda: 4)
    assert find(KDIST | FAR[far]) == find(KDIST)
    with pytest.raises(ValueError, match="with kdist.ray.Trainer in place"):
        find(FAR[far])


def test_two_that_agree() -> None:
    said = KDIST | {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert find(said) == find(KDIST)


def test_token_and_address_are_of_the_environment() -> None:
    found = find(KDIST | {"KDIST_TOKEN": "secret", "KDIST_ADDRESS": "10.0.0.7:9"})
    assert found == Place(3, 4, "10.0.0.1:4000", "KDIST_*", "secret", "10.0.0.7:9")
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    ("process", "count", "coordinator", "rule"),
    [
        (4, 4, "a:1", "numbered from 0"),
        (-1, 4, "a:1", "numbered from 0"),
        (0, 0, "a:1", "numbered from 0"),
        (0, 2, "a", "An address is"),
        (0, 2, "a:99999", "An address is"),
        (0, 2, "::1:80", "An address is"),
    ],
)
def test_places_that_are_none(process: int, count: int, coordinator: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Place(process, count, coordinator, "a test")
