#!/usr/bin/env bash
# Copies a model folder to a node-local disk, once a node, and prints the copy's path.
#
#   srun --ntasks-per-node=1 bash jobs/stage_model.sh [--link PATH] MODEL [FOLDER]
#
#   MODEL         a Hugging Face folder; links in it are followed
#   FOLDER        where to put the copy (default: $TMPDIR or /tmp)
#   --link PATH   makes PATH a link to the copy: a name that is the same on every node and in every job
#   STAGE_MAX_BYTES=...   use no more of the disk than this, beside what its free space allows
#   STAGE_STREAMS=4       files copied, or checked, at a time
#
# Several calls on one node wait for the first and use its copy. Each file is read once from MODEL and its SHA-256 taken
# on the way; the copy is read back and must have the same. It gets its name only when it is whole. A copy that is there
# is used if its files have MODEL's sizes and times and their own SHA-256; otherwise it is made anew.
set -euo pipefail

say() { echo "stage_model: $(hostname): $*" >&2; }
stop() { say "$@"; exit 1; }

# Some schedulers send their warning to every process of a job; a copy that is under way is finished.
trap '' USR1

link=""
case ${1:-} in
    -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
    --link) link=${2:?}; shift 2 ;;
esac
[ $# = 1 ] || [ $# = 2 ] || stop "needs MODEL and at most one FOLDER"
[ -f "$1/config.json" ] || stop "$1 is no model folder: it has no config.json"
model=$(realpath "$1")
root=${2:-${TMPDIR:-/tmp}}/essa_mpi-$(id -u)-models
streams=${STAGE_STREAMS:-4}
case ${STAGE_MAX_BYTES:-0}$streams in *[!0-9]*) stop "STAGE_MAX_BYTES and STAGE_STREAMS are numbers" ;; esac
mkdir -p "$root"
[ -O "$root" ] || stop "$root belongs to somebody else; name another FOLDER"
# Two models may have the same name in different places.
name=$(basename "$model")-$(printf %s "$model" | sha256sum | cut -c 1-12)
copy=$root/$name
list=.essa_mpi-staged       # in the copy: a line "sha256  size time  path" a file

# Size, time of change and path of each file below a folder, in one order everywhere.
files() { (cd "$1" && find -L . -type f ! -name "$list" -printf '%s %T@ %P\n' | LC_ALL=C sort -k 3); }

copy_file() {   # of $model to $partial; prints its line of the list
    local sum again
    mkdir -p "$partial/$(dirname "$1")"
    sum=$(tee "$partial/$1" < "$model/$1" | sha256sum | cut -c 1-64)
    [ "$(stat -L -c %s "$model/$1")" = "$(stat -c %s "$partial/$1")" ] || { echo "$1 has another size" >&2; return 1; }
    again=$(sha256sum < "$partial/$1" | cut -c 1-64)
    [ "$sum" = "$again" ] || { echo "$1 does not read back as it was written" >&2; return 1; }
    printf '%s  %s\n' "$sum" "$1"
}

intact() {      # is the copy that is there MODEL's, and as it was written?
    [ -f "$copy/$list" ] || return 1
    [ "$(sed -n 's/^# //p' "$copy/$list")" = "$(files "$model")" ] ||
        { say "the copy is of another state of $model"; return 1; }
    [ "$(files "$copy" | cut -d ' ' -f 1,3-)" = "$(files "$model" | cut -d ' ' -f 1,3-)" ] ||
        { say "the copy's files are not $model's"; return 1; }
    # shellcheck disable=SC2016
    (cd "$copy" && sed -n '/^[^#]/p' "$list" | tr '\n' '\0' |
        xargs -0 -n 1 -P "$streams" sh -c 'printf "%s\n" "$0" | sha256sum --quiet --status -c -') ||
        { say "the copy is damaged"; return 1; }
}

exec 9> "$root/.$name.lock"
flock -n 9 || { say "waiting for another copy of $model to finish"; flock 9; }
if ! intact; then
    # What a killed call left. Under the lock nobody else is writing here.
    rm -rf "$copy" "$root/.$name.partial"
    wanted=$(files "$model")
    bytes=$(awk '{ sum += $1 } END { printf "%.0f", sum }' <<< "$wanted")
    free=$(($(df --output=avail -B 1024 "$root" | tail -n 1) * 1024))
    if [ -n "${STAGE_MAX_BYTES:-}" ] && [ "$STAGE_MAX_BYTES" -lt "$free" ]; then free=$STAGE_MAX_BYTES; fi
    [ "$bytes" -le "$free" ] || stop "$model has $bytes bytes and $root room for $free; name another FOLDER, or run" \
        "from $model itself"
    partial=$root/.$name.partial
    mkdir "$partial"
    trap 'rm -rf "$partial"' EXIT
    export model partial
    export -f copy_file
    # shellcheck disable=SC2016
    cut -d ' ' -f 3- <<< "$wanted" | tr '\n' '\0' |
        xargs -0 -n 1 -P "$streams" bash -c 'set -euo pipefail; copy_file "$0"' > "$partial/$list.sums" ||
        stop "could not copy $model to $root (above: why); nothing is left of it"
    { printf '%s\n' "$wanted" | sed 's/^/# /'; cat "$partial/$list.sums"; } > "$partial/$list"
    rm "$partial/$list.sums"
    [ "$(files "$model")" = "$wanted" ] || stop "$model changed while it was copied"
    sync -f "$partial"
    mv -T "$partial" "$copy"
    say "copied $bytes bytes of $model to $copy"
fi
if [ -n "$link" ]; then
    [ ! -d "$link" ] || [ -L "$link" ] || stop "$link is a folder; name another --link"
    mkdir -p "$(dirname "$link")"
    [ -O "$(dirname "$link")" ] || stop "$(dirname "$link") belongs to somebody else; name another --link"
    ln -sfn "$copy" "$link.$$"
    mv -T "$link.$$" "$link"        # at once: a rank may be looking
fi
echo "$copy"
