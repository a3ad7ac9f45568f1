#!/usr/bin/env bash
# Sourced: reads what a job script must know of a config, without Python, which may be in a container.

# setting KEY: a string or number of $config, or of --set KEY=... in $arguments, the last of which holds.
# shellcheck disable=SC2154
setting() {
    local value argument
    # Up to the first [table], whose keys are others.
    value=$(sed -n "/^[[:space:]]*\[/q; s/^[[:space:]]*$1[[:space:]]*=[[:space:]]*//p" "$config" | tail -n 1)
    case $value in      # a comment may follow
        \"*) value=${value#?} value=${value%%\"*} ;;
        \'*) value=${value#?} value=${value%%\'*} ;;
        *) value=${value%%[[:space:]#]*} ;;
    esac
    for argument in "${arguments[@]}"; do
        case $argument in
            "$1="*) value=${argument#*=} ;;
            "--set=$1="*) value=${argument#--set="$1="} ;;
        esac
    done
    value=${value#[\"\']}
    echo "${value%[\"\']}"
}
