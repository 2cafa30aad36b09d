"""What `examples/cluster/` starts: Slurm's batch script is run, Kubernetes' manifests are read."""

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from kdist.cluster.sources import find

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
SRUN = """
srun() {
    shift
    for number in 0 1; do
        SLURM_PROCID=$number SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_STEP_ID=0 \\
            "$@" >"$LOGS/$number" 2>&1 &
    done
    first=0
    for job in $(jobs -p); do wait "$job" || first=$?; done
    return $first
}
"""
"""What Slurm's `srun` does, on this machine alone."""


@pytest.mark.wide
def test_the_batch_script_of_slurm(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if "KDIST" not in name}
    python = Path(sys.executable).parent
    variables |= {
        "PATH": f"{python}:{os.environ['PATH']}",
        "LOGS": str(tmp_path),
        "SLURM_JOB_ID": str(secrets.randbelow(10**9)),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    script = (EXAMPLES / "slurm.sh").read_text()
    assert script.startswith("#!/bin/sh") and "#SBATCH --nodes=2" in script
    done = subprocess.run(
        ["bash", "-c", SRUN + script, "slurm.sh", str(tmp_path / "checkpoints")],
        cwd=EXAMPLES.parents[1],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = {number: (tmp_path / number).read_text() for number in "01"}
    assert done.returncode == 0, done.stderr + said["0"] + said["1"]
    assert "start 2" not in done.stderr
    assert "4 devices, loss 0." in said["0"]
    assert "process 1 of 2 serves localhost:" in said["1"] and "(from Slurm)" in said["1"]
    assert "4 devices" not in said["1"]
    assert list((tmp_path / "checkpoints").glob("step-00000040*"))


@pytest.mark.parametrize("name", ["kubernetes_job", "kubernetes_jobset"])
def test_a_manifest_of_kubernetes(name: str) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    parts = {
        part["kind"]: part
        for part in yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    }
    if name == "kubernetes_job":
        job = parts["Job"]
        coordinator = "train-0.train"
        chosen = {"job-name": job["metadata"]["name"]}
        assert parts["Service"]["spec"]["selector"] == chosen
        assert parts["Service"]["spec"]["clusterIP"] == "None"
        assert job["spec"]["template"]["spec"]["subdomain"] == parts["Service"]["metadata"]["name"]
    else:
        jobs = parts["JobSet"]
        job = jobs["spec"]["replicatedJobs"][0]["template"]
        coordinator = f"train-workers-0-0.{jobs['spec']['network']['subdomain']}"
        chosen = {"jobset.sigs.k8s.io/jobset-name": jobs["metadata"]["name"]}
    spec: dict[str, Any] = job["spec"]
    assert spec["completionMode"] == "Indexed"
    (container,) = spec["template"]["spec"]["containers"]
    given = {one["name"]: one.get("value", "a secret") for one in container["env"]}
    places = [
        find(given | {"JOB_COMPLETION_INDEX": str(index)}) for index in range(spec["completions"])
    ]
    for index, place in enumerate(places):
        assert place is not None
        assert (place.process, place.count) == (index, spec["parallelism"])
        assert place.coordinator.startswith(coordinator + ":") and place.token == "a secret"
    policy = parts["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == chosen
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": chosen}}]}]
