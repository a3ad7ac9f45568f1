#!/usr/bin/env bash
#flux: --job-name=essa_mpi
#flux: --nodes=2
#flux: --exclusive
#flux: --time-limit=12h
#flux: --signal=USR1@5m
#flux: --output=essa_mpi-{{id}}.out
# Any system with Flux; the numbers are for nodes with four GPUs (Tuolumne, El Capitan: MI300A):
#
#   flux batch --bank=... --queue=pbatch jobs/flux/generic.flux config.toml [arguments of `essa_mpi run`]
#
# https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man1/flux-batch.html
# https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-shell-options.html
set -euo pipefail
# shellcheck disable=SC2034
script=jobs/flux/generic.flux
# A batch script is not given its job's number in the environment.
ESSA_MPI_CHAIN=${ESSA_MPI_CHAIN:-$(flux getattr jobid)}
[ "${AMD:-yes}" != yes ] || container_gpu=--rocm
# shellcheck source=jobs/cluster/common.sh
. "${ESSA_MPI_HOME:-$PWD}/jobs/cluster/common.sh"
[ -z "${ESSA_MPI_HOME:-}" ] || script=$ESSA_MPI_HOME/$script

gpus=${GPUS_PER_NODE:-4}
nodes=$(flux resource list --states=up --no-header --format='{nnodes}')
# Flux signals this script and the ranks: nothing to hand on.
tell_ranks=(true)

# STAGE_TO=$TMPDIR
stage flux run --nodes="$nodes" --tasks-per-node=1 --exclusive
# Flux knows CUDA_VISIBLE_DEVICES only, and would set it to what ROCr may no longer show by that number; off, and
# rank_gpu.sh gives the GPU (https://docs.olcf.ornl.gov/systems/frontier_user_guide.html, "Flux", advises the same).
# AMD=no: NVIDIA GPUs. per-task: the node's cores in as many parts as ranks. A step ends a minute after its first rank.
flag=--amd
[ "${AMD:-yes}" = yes ] || flag=
start flux run --nodes="$nodes" --tasks-per-node="$gpus" --exclusive -o cpu-affinity=per-task -o gpu-affinity=off \
    -o exit-timeout=60s bash "$home/jobs/cluster/rank_gpu.sh" ${flag:+"$flag"} "$gpus"
