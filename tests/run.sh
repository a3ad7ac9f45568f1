#!/usr/bin/env bash
# Installs what the suite needs, makes the quickstart's model, data and warm start, and runs every test.
#
#   bash tests/run.sh [--fast] [pytest arguments]
#
#   --fast   without the tests marked slow
#   e.g. bash tests/run.sh tests/test_search.py -k separable -x
#
# Tests marked mpi run under mpirun on 1, 2, 3 and 4 ranks (counted once a number of ranks, and only
# where there are as many as their min_size asks), the others once in one process.
# The last line sums all of it. What ranks other than 0 print is in .cache/tests/ and shown if they fail.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
logs=.cache/tests
serial_limit=45m    # of a whole stage: a guard against a hang, not a measure of speed
ranks_limit=10m

mark="" arguments=()
also() { mark=${mark:+($mark) and }$1; }
while [ $# -gt 0 ]; do
    case $1 in
        --fast) also "not slow" ;;
        # pytest heeds only the last -m, and the stages below need their own: both must hold.
        -m) [ $# -gt 1 ] || { echo "tests/run.sh: -m needs an expression" >&2; exit 2; }
            also "($2)"; shift ;;
        -m*) also "(${1#-m})" ;;
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
stage_mark() { echo "${mark:+($mark) and }$1"; }

mkdir -p "$logs"
rm -f "$logs"/*
notes=$logs/stages      # a line a stage: its name, ranks and exit code

if ! bash jobs/setup.sh --test; then
    printf '\n0 passed, 1 failed, 0 skipped\n'
    exit 1
fi
# shellcheck disable=SC1091
. .venv/bin/activate
# Without the model the tests that need it skip; that must not pass for a whole suite.
if ! bash jobs/quickstart.sh --prepare; then
    echo "tests/run.sh: the quickstart's model, data or warm start could not be made" >&2
    echo "preparation 0 1" >> "$notes"
fi

trap 'exit 130' INT
stage() {
    local name=$1 ranks=$2 limit=$3 code=0; shift 3
    printf '\n=== %s\n' "$name"
    # In the foreground, so that Ctrl-C reaches the tests, and with SIGINT not ignored, which those that
    # send it would inherit. A TERM at the limit reaches pytest or mpirun, and both end what they started.
    timeout --foreground --kill-after=30 "$limit" "$@" < /dev/null || code=$?
    [ "$code" != 124 ] || echo "tests/run.sh: $name: stopped after $limit" >&2
    echo "$name $ranks $code" >> "$notes"
}

options=(-q -ra --durations=5 --durations-min=5 ${arguments[@]+"${arguments[@]}"})
stage serial 1 "$serial_limit" \
    env "ESSA_MPI_TEST_LOG=$logs/serial.0" python -m pytest "${options[@]}" -m "$(stage_mark "not mpi")"

# shellcheck disable=SC2016
as_rank='rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-0}}}
export ESSA_MPI_TEST_LOG=$0.$rank OMP_NUM_THREADS=1
[ "$rank" = 0 ] || exec > "$0.$rank.txt" 2>&1
exec "$@"'
for n in 1 2 3 4; do
    # A test in which one rank waits for another for ever ends itself after faulthandler_timeout seconds.
    stage "mpirun-$n" "$n" "$ranks_limit" mpirun -n "$n" bash -c "$as_rank" "$logs/mpirun-$n" \
        python -m pytest --with-mpi -p no:cacheprovider -o faulthandler_timeout=180 \
        "${options[@]}" -m "$(stage_mark mpi)"
done

# The conftest writes what became of each test as it happens, so that a crash is counted too.
python - "$logs" <<'PY'
import json, sys
from pathlib import Path

logs = Path(sys.argv[1])
total = dict.fromkeys(("passed", "failed", "skipped"), 0)
WORST = ("failed", "started", "skipped", "passed")      # what a test is that was several of these
failures, show = [], []
for line in (logs / "stages").read_text().splitlines():
    stage, ranks, code = line.split()
    tests, failed = {}, 0
    for rank in range(int(ranks)):
        file = logs / f"{stage}.{rank}"
        seen = {}
        for entry in file.read_text().splitlines() if file.is_file() else ():
            try:
                test, outcome = json.loads(entry)
            except ValueError:      # cut short by a kill
                continue
            seen.setdefault(test, set()).add(outcome)
        for test, outcomes in seen.items():
            if len(outcomes) > 1:
                outcomes.discard("started")
            tests.setdefault(test, {})[rank] = next(o for o in WORST if o in outcomes)
    for test, by_rank in tests.items():
        outcome = next(o for o in WORST if o in by_rank.values())
        if outcome == "started":
            outcome = "failed"
        total[outcome] += 1
        if outcome == "failed":
            failed += 1
            bad = [r for r, o in by_rank.items() if o == "failed"]
            hung = [r for r, o in by_rank.items() if o == "started"]
            where = "" if ranks == "1" or not bad else f" on rank {', '.join(map(str, bad))} of {ranks}"
            failures.append(f"{stage}: {test}{where}" + (" (did not end)" if hung and not bad else ""))
            show += [(stage, r) for r in bad or hung if r and (stage, r) not in show]
    if code not in ("0", "5") and not failed:       # 5: nothing to run in this stage
        total["failed"] += 1
        failures.append(f"{stage}: exit code {code}, with no test that failed")
        show += [(stage, r) for r in range(1, int(ranks))]
for stage, rank in show:
    text = logs / f"{stage}.{rank}.txt"
    if text.is_file():
        print(f"\n=== {stage}, rank {rank}: the end of {text}")
        print("\n".join(text.read_text(errors="replace").splitlines()[-60:]))
if failures:
    print("\n=== failed")
    print("\n".join(failures))
if not any(total.values()):
    print("\ntests/run.sh: no test was selected")
print(f"\n{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
sys.exit(1 if total["failed"] or not any(total.values()) else 0)
PY
