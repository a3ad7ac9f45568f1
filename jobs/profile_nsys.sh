#!/usr/bin/env bash
# Runs chosen ranks under Nsight Systems and the others as they are. Between the launcher and the program:
#
#   srun ... bash jobs/profile_nsys.sh [--ranks 0,3] [--out FOLDER] COMMAND...
#   srun ... bash jobs/profile_nsys.sh python -m essa_mpi run config.toml --set generations=3
#
#   --ranks   a comma-separated list, or all (default: 0)
#   --out     a report a rank: FOLDER/rank0.nsys-rep (default: nsys)
#   NSYS=/path/to/nsys   NSYS_MPI=openmpi or mpich (default: by the launcher's variables, else mpich)
#
# A report has CUDA, NVTX, MPI and the operating system's waits. The program's NVTX ranges are its phases: perturb,
# place, generate, score, allgather (with the wait for the slowest rank), update, checkpoint. Without a screen:
#
#   nsys stats --report mpi_event_sum,nvtx_sum,nvtx_gpu_proj_sum nsys/rank0.nsys-rep
#
# nsys slows a run: take no scaling numbers from it. Let it end by itself, after few generations: whether nsys hands a
# SIGUSR1 on to the program is not documented.
# https://docs.nvidia.com/nsight-systems/UserGuide/
set -euo pipefail

ranks=0 out=nsys
while :; do
    case ${1:-} in
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
        --ranks) ranks=${2:?}; shift 2 ;;
        --out) out=${2:?}; shift 2 ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || { echo "profile_nsys: no command to profile" >&2; exit 2; }
[[ $ranks =~ ^(all|[0-9]+(,[0-9]+)*)$ ]] || { echo "profile_nsys: --ranks $ranks: 0,3 or all" >&2; exit 2; }

rank=${OMPI_COMM_WORLD_RANK:-${PALS_RANKID:-${PMIX_RANK:-${PMI_RANK:-${FLUX_TASK_RANK:-${SLURM_PROCID:-0}}}}}}
case ,$ranks, in
    ,all,|*,"$rank",*) ;;
    *) exec "$@" ;;
esac
nsys=${NSYS:-nsys}
command -v "$nsys" > /dev/null ||
    { echo "profile_nsys: no nsys on PATH; load the site's module, or set NSYS" >&2; exit 1; }
mpi=${NSYS_MPI:-$([ -n "${OMPI_COMM_WORLD_RANK:-}" ] && echo openmpi || echo mpich)}
mkdir -p "$out"
# --sample=none: CPU samples need rights that compute nodes seldom give. Graph nodes are traced one by one, or vLLM's
# CUDA graphs would be one bar.
exec "$nsys" profile --trace=cuda,nvtx,mpi,osrt --mpi-impl="$mpi" --sample=none --cpuctxsw=none \
    --cuda-graph-trace=node --force-overwrite=true --output="$out/rank$rank" "$@"
