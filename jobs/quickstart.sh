#!/usr/bin/env bash
# From a clone to an evolved adapter in one command; a second call reuses all but the evolution.
#
#   bash jobs/quickstart.sh [--gpu] [--prepare] [arguments of `python -m essa_mpi run`]
#
#   --gpu      vLLM for GPUs, a rank a GPU; without it: vLLM for CPUs, two ranks
#   --prepare  all that comes before the evolution, and no more
#   RANKS=4    another number of ranks
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
config=jobs/quickstart.toml
data=.cache/quickstart

setup=() prepare="" arguments=()
for argument in "$@"; do
    case $argument in
        --gpu) setup=(--gpu) ;;
        --prepare) prepare=yes ;;
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
        *) arguments+=("$argument") ;;
    esac
done

bash jobs/setup.sh ${setup[@]+"${setup[@]}"}
# shellcheck disable=SC1091
. .venv/bin/activate

# CPUs or GPUs: what set-up left in .venv, which may be there from an earlier --gpu.
if grep -q '^gpu' .venv/essa_mpi-installed; then
    gpus=$(python -c 'from essa_mpi.seat import visible_gpus; print(len(visible_gpus()))')
    [ "$gpus" -gt 0 ] || { echo "quickstart: .venv has vLLM for GPUs and no GPU is visible;" \
        "bash jobs/setup.sh --cpu makes one for CPUs" >&2; exit 1; }
    ranks=${RANKS:-$gpus}
else
    export CUDA_VISIBLE_DEVICES=    # a GPU that this vLLM cannot use would still be counted
    ranks=${RANKS:-2}
fi

# The data are a function of a seed: made each time (a moment), taken over only if they changed.
python jobs/largest_number.py --out "$data/made" > /dev/null
for file in "$data"/made/*.jsonl; do
    if ! cmp -s "$file" "$data/${file##*/}"; then
        mv "$file" "$data/"
        rm -rf "$data/warm_start"    # it was learnt from other rows
    fi
done
rm -rf "$data/made"

model=$(python -c 'import sys; from essa_mpi import config; print(config.load(sys.argv[1]).model)' "$config")
if ! [ -e "$model/config.json" ]; then
    echo "quickstart: making $model (half a minute)"
fi
python jobs/prepare_model.py --out "$model"

# sft.json beside the adapter tells with which settings it was made.
same_warm_start() {
    python - "$config" <<'PY'
import json, sys
from pathlib import Path
from essa_mpi import config
asked = config.load(sys.argv[1])
try:
    made = json.loads((Path(asked.adapter) / "sft.json").read_text())["config"]
except (OSError, ValueError, KeyError):
    sys.exit(1)
sys.exit(any(getattr(asked, key, None) != value for key, value in made.items()))
PY
}
if ! same_warm_start; then
    echo "quickstart: the supervised warm start (about a minute)"
    TQDM_DISABLE=1 python -m essa_mpi sft "$config" < /dev/null
fi
[ -z "$prepare" ] || exit 0

echo "quickstart: mpirun -n $ranks python -m essa_mpi run $config${arguments[*]:+ ${arguments[*]}}"
mpirun -n "$ranks" python -m essa_mpi run "$config" ${arguments[@]+"${arguments[@]}"} < /dev/null
echo "these paths are below $PWD"
