#!/usr/bin/env bash
# Submits a job script, to whichever scheduler it is written for.
#
#   bash jobs/submit.sh SCRIPT [--nodes N] [the scheduler's options] -- CONFIG [arguments of `essa_mpi run`]
#   bash jobs/submit.sh jobs/pbs/polaris.pbs --nodes 10 -A myproject -q prod -- config.toml --set seed=2
#
# Slurm and Flux can do without: sbatch -A myproject jobs/slurm/leonardo.sbatch config.toml
# A job that wants to go on at the end of its time is submitted again with the same options.
set -euo pipefail

case ${1:-} in
    -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
esac
stop() { echo "submit: $*" >&2; exit 2; }
[ $# -gt 0 ] && [ -f "$1" ] || stop "needs a job script, one of jobs/{slurm,pbs,lsf,flux}"
script=$1; shift
nodes="" options=() arguments=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
        --nodes) nodes=${2:-}; [[ $nodes =~ ^[1-9][0-9]*$ ]] || stop "--nodes needs a number"; shift ;;
        *) options+=("$1") ;;
    esac
    shift
done
[ $# -gt 1 ] || stop "needs -- CONFIG after the scheduler's options"
shift
arguments=("$@")
[ -f "$1" ] || stop "$1: no such file"

case $script in
    *.sbatch) submit=(sbatch ${nodes:+--nodes="$nodes"}) ;;
    *.flux)   submit=(flux batch ${nodes:+--nodes="$nodes"}) ;;
    *.bsub)   submit=(bsub ${nodes:+-nnodes "$nodes"}) ;;
    *.pbs)    # as many chunks of the kind that the script asks for
              chunk=$(sed -n 's/^#PBS -l select=[0-9]*\(.*\)/\1/p' "$script" | head -n 1)
              submit=(qsub ${nodes:+-l "select=$nodes$chunk"}) ;;
    *) stop "$script: not .sbatch, .pbs, .bsub or .flux" ;;
esac
command -v "${submit[0]}" > /dev/null || stop "there is no ${submit[0]} here, which takes $script"
submit+=(${options[@]+"${options[@]}"})
# shellcheck disable=SC2034     # passed on
printf -v ESSA_MPI_SUBMIT '%q ' "${submit[@]}"

# shellcheck source=jobs/cluster/pass_on.sh
. "$(dirname "${BASH_SOURCE[0]}")/cluster/pass_on.sh"
unset ESSA_MPI_CHAIN        # a job submitted from within a job begins a chain of its own
pass_on
case $script in
    *.pbs)  "${submit[@]}" -v "$passed_on" "$script" ;;
    *.bsub) "${submit[@]}" < "$script" ;;
    *)      "${submit[@]}" "$script" "${arguments[@]}" ;;
esac
