#!/usr/bin/env bash
# shellcheck disable=SC2154     # run_name, passed_on: common.sh's; script: the job script's
#
# Sourced by common.sh: runs the ranks, tells them when the time is nearly over, and gives the job back to the
# queue if the run wants to go on.
#
# The program's exit codes:
#   0                done
#   $CHECKPOINTED    it has checkpointed and wants to go on: after SIGUSR1, or at the end of its time budget
#   anything else    it failed: the job ends with that code, and nothing is requeued
CHECKPOINTED=75     # EX_TEMPFAIL of sysexits.h; the one place in jobs/ that has it

# Two ends to a chain of jobs that would otherwise go round for ever.
MAX_REQUEUES=${MAX_REQUEUES:-100}
MAX_STALLS=${MAX_STALLS:-2}     # jobs in a row that ended without a new generation

say() { echo "job: $*"; }
stop() { echo "job: $*" >&2; exit 1; }
for limit in MAX_REQUEUES MAX_STALLS; do
    case ${!limit} in ''|*[!0-9]*) stop "$limit=${!limit} is no number" ;; esac
done

# The batch script is what the scheduler signals (Slurm: --signal=B:USR1@...), and it hands the signal to the
# launcher, which hands it to the ranks: one way for every scheduler and every launcher. A signal to all processes
# instead would kill what does not expect it, such as a copy of the model that is under way.
warned="" launcher=""
tell_ranks=(signal_launcher)     # a script may set another way, or true where the ranks get the signal anyhow
signal_launcher() { kill -USR1 "$launcher" 2> /dev/null || true; }
on_warning() {
    warned=yes
    [ -z "$launcher" ] || "${tell_ranks[@]}" || true
}
trap on_warning USR1

# For schedulers without a warning of their own: SIGUSR1 to this script after so many seconds.
timer=""
warn_after() {
    [ "$1" -gt 0 ] || stop "the time limit leaves no room for the warning before it; ask for more time, or set MARGIN"
    (
        trap 'kill "$sleeper"; exit' TERM       # or the sleep would outlive the job
        sleep "$1" & sleeper=$!
        wait "$sleeper" && kill -USR1 $$
    ) > /dev/null 2>&1 &                        # or it would hold the job's output open
    timer=$!
}
stop_timer() { [ -z "$timer" ] || kill "$timer" 2> /dev/null || true; }
trap stop_timer EXIT

# 1:30:00 or 90 (minutes) in seconds.
seconds() {
    local IFS=: parts total=0 part
    read -ra parts <<< "$1"
    for part in "${parts[@]}"; do total=$((total * 60 + 10#$part)); done
    [ "${#parts[@]}" -gt 1 ] || total=$((total * 60))
    echo "$total"
}

# What is known of this chain of jobs: a line "requeues stalls", there from its first start to its end. That it is
# there means that the run was started before, in whatever way that job ended: requeued here, by the scheduler
# after a node failed, or preempted.
chain=${ESSA_MPI_CHAIN:-${SLURM_JOB_ID:-${PBS_JOBID:-${LSB_JOBID:-$$}}}}
chain_file() { echo "runs/.jobs/${chain//[^A-Za-z0-9._-]/_}"; }

generations_done() {
    if [ -f "runs/$run_name/metrics.jsonl" ]; then wc -l < "runs/$run_name/metrics.jsonl"; else echo 0; fi
}

# run_and_requeue LAUNCHER...: the launcher with all its arguments, without --resume. Leaves the script.
run_and_requeue() {
    local state requeues=0 stalls=0 before=0 after code=0 status told=""
    state=$(chain_file)
    mkdir -p "${state%/*}"
    if [ -e "$state" ]; then
        # Empty after a quota ran out, or whatever else: then the counts begin anew.
        read -r requeues stalls < "$state" || true
        case $requeues/$stalls in /*|*/|*[!0-9/]*) requeues=0 stalls=0 ;; esac
        # Without a run folder (it was stopped before it made one) --resume starts from the beginning.
        set -- "$@" --resume
    fi
    case " $* " in *" --resume "*) before=$(generations_done) ;; esac
    echo "$requeues $stalls" > "$state"

    if [ -n "$warned" ]; then
        say "the time was over before the ranks were started"
        code=$CHECKPOINTED
    else
        say "$*"
        "$@" < /dev/null & launcher=$!
        # A signal that came since the last look was noted but had nobody to go to.
        if [ -n "$warned" ]; then told=yes; "${tell_ranks[@]}" || true; fi
        # A trapped signal ends `wait` early, with a code that is not the launcher's: wait again.
        while :; do
            warned="" status=0
            wait "$launcher" || status=$?
            code=$status
            [ -n "$warned" ] || break
            told=yes
        done
        launcher=""
    fi
    trap '' USR1

    # Ranks that have no handler yet end by the signal itself; srun says 128 + 10, Hydra 10. They had done nothing yet.
    if [ -n "$told" ] && { [ "$code" = "$(kill -l USR1)" ] || [ "$code" = $((128 + $(kill -l USR1))) ]; }; then
        say "the warning came before the ranks were up"
        code=$CHECKPOINTED
    fi
    if [ "$code" != "$CHECKPOINTED" ]; then
        rm -f "$state"
        [ "$code" = 0 ] || echo "job: the run failed with exit code $code; it is not requeued" >&2
        exit "$code"
    fi

    after=$(generations_done)
    if [ "$after" -gt "$before" ]; then stalls=0; else stalls=$((stalls + 1)); fi
    if [ "$stalls" -ge "$MAX_STALLS" ] || [ "$requeues" -ge "$MAX_REQUEUES" ]; then
        rm -f "$state"
        echo "job: not requeued: runs/$run_name is at $after generations after $requeues requeues, and the last" \
            "$stalls jobs added none. If a generation does not fit in the time limit, ask for more; continue with" \
            "--resume" >&2
        exit "$CHECKPOINTED"
    fi
    echo "$((requeues + 1)) $stalls" > "$state"
    if ! requeue; then
        echo "job: could not requeue; runs/$run_name is checkpointed: submit the same job again with --resume" >&2
        exit "$CHECKPOINTED"
    fi
    say "requeued (requeue $((requeues + 1)) of this chain) at $after generations of runs/$run_name"
    exit 0
}

# Slurm takes the same job again. The others get a new one: submitted as jobs/submit.sh was told to, or with the
# options in the script's head if it was submitted without.
requeue() {
    export ESSA_MPI_CHAIN=$chain
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        scontrol requeue "$SLURM_JOB_ID"
        return
    fi
    if [ -z "${PBS_JOBID:-}${LSB_JOBID:-}${FLUX_URI:-}" ]; then
        echo "job: no Slurm, PBS, LSF or Flux here" >&2
        return 1
    fi
    [ -n "${script:-}" ] || { echo "job: this script does not set script=ITS-OWN-PATH" >&2; return 1; }
    pass_on
    local submit=()
    eval "submit=(${ESSA_MPI_SUBMIT:-})"
    if [ -n "${PBS_JOBID:-}" ]; then
        [ "${#submit[@]}" -gt 0 ] || submit=(qsub)
        "${submit[@]}" -v "$passed_on" "$script"
    elif [ -n "${LSB_JOBID:-}" ]; then
        [ "${#submit[@]}" -gt 0 ] || submit=(bsub)
        "${submit[@]}" < "$script"       # bsub reads #BSUB lines from its input alone
    else
        # This script runs inside the job's own instance of Flux; the queue is its parent's.
        [ "${#submit[@]}" -gt 0 ] || submit=(flux batch)
        flux proxy "$(flux getattr parent-uri)" "${submit[@]}" "$script" "${arguments[@]}"
    fi
}
