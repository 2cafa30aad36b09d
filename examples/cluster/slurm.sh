#!/bin/sh
# A batch script: sbatch examples/cluster/slurm.sh DIRECTORY_OF_CHECKPOINTS
# One process a machine; the directory is on a file system that all machines have.
#SBATCH --job-name=kdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --requeue
set -eu

# Who does not know it is not let in. TensorFlow's servers ask for none: see docs/processes.md.
KDIST_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export KDIST_TOKEN
# Devices that each machine's processors are cut into; without this line, GPUs, or one CPU device.
export KDIST_CPU_DEVICES="${KDIST_CPU_DEVICES:-2}"

# Processes find their places in Slurm's variables. A failed one ends the others by itself; after
# that the same step starts again, and goes on from the newest checkpoint.
start=0
until srun --kill-on-bad-exit=0 python "${KDIST_SCRIPT:-examples/cluster/train.py}" "$1"; do
    start=$((start + 1))
    if [ "$start" -ge 3 ]; then exit 1; fi
    echo "start $((start + 1)) of 3" >&2
done
