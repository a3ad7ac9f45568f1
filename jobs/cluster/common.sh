#!/usr/bin/env bash
# Sourced by every job script, in the folder the job was submitted from: what they share. Afterwards a script calls
#
#   stage LAUNCHER...     one task a node; copies the model there if STAGE_TO is set
#   start LAUNCHER...     one task a GPU; does not return
#
# On PBS, LSF and Flux the script first sets script=ITS-OWN-PATH, which a requeue submits: what runs is a copy.
#
# CONFIG and the run's arguments come as the script's own, or in ESSA_MPI_JOB (jobs/submit.sh sets it).
#
#   ESSA_MPI_HOME         the clone, if the job is not submitted from there
#   ESSA_MPI_COMMAND      run (the default) or grpo
#   ESSA_MPI_CONTAINER    an Apptainer image to run in, instead of .venv
#   STAGE_TO              a node-local folder: the model is copied there first (jobs/stage_model.sh)
#   PROFILE_RANKS=0,1     these ranks run under Nsight Systems (jobs/profile_nsys.sh)
#   MAX_STALLS=2, MAX_REQUEUES=100     ends of a chain of jobs (jobs/cluster/requeue.sh)
#   MARGIN=300            seconds between the warning and the end, where this script keeps the time itself
home=${ESSA_MPI_HOME:-$PWD}
MARGIN=${MARGIN:-300}
# shellcheck source=jobs/cluster/requeue.sh
. "$home/jobs/cluster/requeue.sh"

arguments=("$@")
if [ $# = 0 ]; then eval "arguments=(${ESSA_MPI_JOB:-})"; fi
[ "${#arguments[@]}" -gt 0 ] || stop "no CONFIG: give it after the script's name (Slurm, Flux) or use jobs/submit.sh"
config=${arguments[0]}
[ -f "$config" ] || stop "$config: no such file in $PWD"
# shellcheck source=jobs/cluster/pass_on.sh
. "$home/jobs/cluster/pass_on.sh"

# shellcheck source=jobs/cluster/settings.sh
. "$home/jobs/cluster/settings.sh"
run_name=$(setting name)
[ -n "$run_name" ] || stop "$config names no run: it has no line name = \"...\""

if [ -n "${ESSA_MPI_CONTAINER:-}" ]; then
    # The launcher is outside and starts a container a rank; MPI inside must be of the launcher's family.
    runtime=apptainer
    command -v apptainer > /dev/null || runtime=singularity
else
    if [ -f "$home/.venv/bin/activate" ]; then
        set +u
        # shellcheck disable=SC1091
        . "$home/.venv/bin/activate"
        set -u
    fi
fi

# Ranks exchange a kilobyte from host memory. Cray MPICH with GPU support would refuse to start in a Python that is
# not linked with its GPU library.
export MPICH_GPU_SUPPORT_ENABLED=${MPICH_GPU_SUPPORT_ENABLED:-0}

# srun's own step options, the same everywhere. kill-on-bad-exit, the default of some sites, would kill the other
# ranks as soon as the first leaves with $CHECKPOINTED, and srun would end with 143; wait ends a step 60 seconds after
# its first rank has gone, however it went. The number of tasks is said once more, since --gpus-per-task asks for it.
# From Slurm 22.05 on srun does not look at sbatch's --cpus-per-task; it does at this variable
# (https://slurm.schedmd.com/srun.html).
# shellcheck disable=SC2034     # used by the scripts
slurm_step=(srun --kill-on-bad-exit=0 --wait=60
    ${SLURM_NTASKS_PER_NODE:+--ntasks=$((SLURM_NTASKS_PER_NODE * SLURM_JOB_NUM_NODES))})
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# shellcheck disable=SC2034
slurm_node=(srun --ntasks-per-node=1 --ntasks="${SLURM_JOB_NUM_NODES:-1}")

# The path of a staged model goes into the run's config, and --resume asks for the same config: so the run sees a link
# that has the same name on every node and in every job, wherever STAGE_TO is this time.
stage() {
    [ -n "${STAGE_TO:-}" ] && [ -z "$warned" ] || return 0
    local model link
    model=$(setting model)
    model=$(realpath -m -- "$model")
    STAGE_TO=$(realpath -m -- "$STAGE_TO")
    # Two models may have the same name in different places.
    link=/tmp/essa_mpi-$(id -u)/staged/${model##*/}-$(printf %s "$model" | sha256sum | cut -c 1-12)
    "$@" bash "$home/jobs/stage_model.sh" --link "$link" "$model" "$STAGE_TO"
    staged=(--set "model=$link")
}
staged=()

start() {
    local profile=()
    [ -z "${PROFILE_RANKS:-}" ] ||
        profile=(bash "$home/jobs/profile_nsys.sh" --ranks "$PROFILE_RANKS" --out "runs/$run_name-nsys")
    local python=(python)       # by now it is known where a staged model is
    [ -z "${ESSA_MPI_CONTAINER:-}" ] ||
        python=("$runtime" exec "${container_gpu:---nv}" ${STAGE_TO:+--bind "$STAGE_TO"} "$ESSA_MPI_CONTAINER" python)
    run_and_requeue "$@" ${profile[@]+"${profile[@]}"} "${python[@]}" -m essa_mpi "${ESSA_MPI_COMMAND:-run}" \
        "${arguments[@]}" ${staged[@]+"${staged[@]}"}
}
