#!/usr/bin/env bash
# Submits one config at several numbers of nodes, and writes down which run is which.
#
#   bash jobs/scaling_sweep.sh --nodes 1,2,4,8 [--repeats 5] SCRIPT [the scheduler's options] -- CONFIG [arguments]
#   bash jobs/scaling_sweep.sh --nodes 1,2,4 jobs/slurm/leonardo.sbatch -A myproject -- config.toml --set generations=6
#
#   --ranks-per-node N   default: what the script asks for
#   --dry-run            shows what it would submit
#
# Each run has a name of its own, NAME-nodes4-repeat0. runs/NAME-scaling.csv gets a line for each with the job and the
# run; the measured columns are empty, to be filled from the runs when the jobs are done (`read_history` of
# essa_mpi/runfile.py reads history.h5; metrics.jsonl has the same times but the checkpoint's). Take no numbers
# from the first generation: it compiles and fills caches.
set -euo pipefail

stop() { echo "scaling_sweep: $*" >&2; exit 2; }
jobs=$(dirname "${BASH_SOURCE[0]}")
counts="" repeats=1 per_node="" dry=""
while :; do
    case ${1:-} in
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
        --nodes) counts=${2:?}; shift 2 ;;
        --repeats) repeats=${2:?}; shift 2 ;;
        --ranks-per-node) per_node=${2:?}; shift 2 ;;
        --dry-run) dry=yes; shift ;;
        *) break ;;
    esac
done
[[ $counts =~ ^[1-9][0-9]*(,[1-9][0-9]*)*$ ]] || stop "needs --nodes 1,2,4"
[[ $repeats =~ ^[1-9][0-9]*$ ]] || stop "--repeats $repeats: needs a number"
[ -f "${1:-}" ] || stop "needs a job script, one of jobs/{slurm,pbs,lsf,flux}"
script=$1; shift
options=() arguments=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1"); shift; done
[ $# -gt 1 ] || stop "needs -- CONFIG after the scheduler's options"
shift
arguments=("$@")
config=$1
# shellcheck source=jobs/cluster/settings.sh
. "$jobs/cluster/settings.sh"
[ -f "$config" ] || stop "$config: no such file"
name=$(setting name)
[ -n "$name" ] || stop "$config names no run"
population=$(setting population)
for ((i = 0; i < ${#options[@]}; i++)); do     # what the scheduler is told goes before what the script says
    case ${options[i]} in
        --ntasks-per-node=*) : "${per_node:=${options[i]#*=}}" ;;
        --ntasks-per-node) : "${per_node:=${options[i + 1]:-}}" ;;
    esac
done
: "${per_node:=$(sed -n 's/^#SBATCH --ntasks-per-node=\([0-9]*\).*/\1/p' "$script")}"

table=runs/$name-scaling.csv
columns=ranks,nodes,population,generation,t_total,t_compute_mean,t_compute_max,t_wait,t_allgather,t_update,t_checkpoint
columns+=,speedup,efficiency,repeat,job,run
if [ -z "$dry" ]; then
    mkdir -p runs
    if [ -e "$table" ]; then
        [ "$(head -n 1 "$table")" = "$columns" ] || stop "$table is not a table of this script; move it away"
    else
        echo "$columns" > "$table"
    fi
fi

for ((repeat = 0; repeat < repeats; repeat++)); do
    for nodes in ${counts//,/ }; do
        run=$name-nodes$nodes-repeat$repeat
        [ -n "$dry" ] || ! grep -q ",$run\$" "$table" ||
            stop "$run is in $table already: give another --set name=..., or move the table away"
        submit=(bash "$jobs/submit.sh" "$script" --nodes "$nodes" ${options[@]+"${options[@]}"}
            -- "${arguments[@]}" --set "name=$run")
        if [ -n "$dry" ]; then
            printf '%q ' "${submit[@]}"; echo
            continue
        fi
        answer=$("${submit[@]}")
        # "Submitted batch job 12", "12.polaris-pbs-01", "Job <12> is submitted", "f2ab3c"
        job=$(sed -n 's/^Submitted batch job \([0-9]*\).*/\1/p; s/^Job <\([0-9]*\)>.*/\1/p' <<< "$answer" | head -n 1)
        : "${job:=${answer##*$'\n'}}"
        echo "${per_node:+$((nodes * per_node))},$nodes,$population,,,,,,,,,,,$repeat,$job,$run" >> "$table"
        echo "scaling_sweep: $nodes nodes, repeat $repeat: job $job, runs/$run"
    done
done
[ -n "$dry" ] || echo "scaling_sweep: $table"
