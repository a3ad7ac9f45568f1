#!/usr/bin/env bash
# One GPU for this rank, by its number on the node; then the command. Where the launcher does not do it.
#
#   rank_gpu.sh [--amd] [--reverse] GPUS COMMAND...
#
#   GPUS         of a node, as many as ranks
#   --amd        ROCR_VISIBLE_DEVICES, and no other: HIP and CUDA variables count within what ROCr shows
#   --reverse    the last GPU for the first rank, where GPUs and cores are numbered against each other
set -euo pipefail

amd="" reverse=""
while :; do
    case ${1:-} in
        --amd) amd=yes ;;
        --reverse) reverse=yes ;;
        *) break ;;
    esac
    shift
done
gpus=$1; shift
# Slurm's last: the batch script has it too, and an mpirun within hands it to all its ranks.
rank=${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${PALS_LOCAL_RANKID:-${PMI_LOCAL_RANK:-}}}}
rank=${rank:-${FLUX_TASK_LOCAL_ID:-${SLURM_LOCALID:-}}}
[ -n "$rank" ] || { echo "rank_gpu.sh: no launcher's variable tells this rank's number on its node" >&2; exit 1; }
# Two engines on one GPU run out of memory minutes later, with a message that hides why.
[ "$rank" -lt "$gpus" ] ||
    { echo "rank_gpu.sh: rank $rank of a node with $gpus GPUs: start $gpus ranks a node" >&2; exit 1; }
[ -z "$reverse" ] || rank=$((gpus - 1 - rank))
if [ -n "$amd" ]; then
    unset CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES GPU_DEVICE_ORDINAL
    export ROCR_VISIBLE_DEVICES=$rank
else
    export CUDA_VISIBLE_DEVICES=$rank
fi
exec "$@"
