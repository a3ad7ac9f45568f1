#!/usr/bin/env bash
# Sourced by common.sh and submit.sh: what a job must be told in its environment, for schedulers that take no arguments
# for a script (PBS, LSF).

# pass_on: exports the arguments of the run and those of the variables below that are set; lists them in passed_on.
# PBS refuses to pass on a variable that is not set.
pass_on() {
    local name
    # shellcheck disable=SC2154
    printf -v ESSA_MPI_JOB '%q ' "${arguments[@]}"
    passed_on=ESSA_MPI_JOB
    export ESSA_MPI_JOB
    for name in ESSA_MPI_SUBMIT ESSA_MPI_CHAIN ESSA_MPI_HOME ESSA_MPI_COMMAND ESSA_MPI_CONTAINER STAGE_TO \
            PROFILE_RANKS MARGIN MAX_REQUEUES MAX_STALLS WALLTIME; do
        if [ -n "${!name:-}" ]; then
            export "${name?}"
            passed_on+=,$name
        fi
    done
}
