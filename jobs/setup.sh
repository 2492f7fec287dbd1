#!/usr/bin/env bash
# Installs what is missing with the system's package manager, then builds into build/.
#   bash jobs/setup.sh [--tests] [-DNAME=VALUE ...]
# --tests: also what the tests need, and the tests themselves. The rest goes to CMake.
# Where nothing is missing nothing is installed, and no rights are needed.
set -euo pipefail
cd "$(dirname "$0")/.."

tests=OFF
if [ "${1:-}" = --tests ]; then
    tests=ON
    shift
fi

missing=()
need() { # need PACKAGE COMMAND...: PACKAGE, by its Debian name, is missing where COMMAND fails
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || missing+=("$package")
}
compiles() { echo 'int main(void) { return 0; }' | "${CC:-cc}" -x c -o /dev/null -; }
finds_hdf5() { command -v h5cc || pkg-config --exists hdf5; }

compiles >/dev/null 2>&1 || missing+=(gcc libc6-dev)
need cmake command -v cmake
need ninja-build command -v ninja
need pkg-config command -v pkg-config
need libopenmpi-dev command -v mpicc
need openmpi-bin command -v mpirun
need libhdf5-dev finds_hdf5
need libopenblas-dev pkg-config --exists openblas
need libpcre2-dev pkg-config --exists libpcre2-8
need libutf8proc-dev pkg-config --exists libutf8proc
need libjansson-dev pkg-config --exists jansson
need zlib1g-dev pkg-config --exists zlib
if [ $tests = ON ]; then
    need libcmocka-dev pkg-config --exists cmocka
    need hdf5-tools command -v h5dump
    need python3 test -x /usr/bin/python3
    need python3-numpy /usr/bin/python3 -c 'import numpy'
    need python3-h5py /usr/bin/python3 -c 'import h5py'
    need python3-matplotlib /usr/bin/python3 -c 'import matplotlib'
    if [ "$(id -u)" = 0 ]; then # the tests of the job files start a Slurm of their own, as root
        need munge command -v munged
        need slurmctld command -v slurmctld
        need slurmd command -v slurmd
        need slurm-client command -v sbatch
    fi
fi

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}
if [ ${#missing[@]} -gt 0 ]; then
    echo "missing: ${missing[*]}"
    if ! command -v apt-get >/dev/null; then
        echo "These are the names on Debian and Ubuntu. There is no apt-get here: install what this system calls them" \
             "(CMake 3.25 or newer, serial HDF5 1.10 or newer), then run this again." >&2
        exit 1
    elif [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; then
        echo "There is no sudo here. As root: apt-get install --no-install-recommends ${missing[*]}" >&2
        exit 1
    fi
    apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
    as_root "${apt[@]}" update || echo "apt-get update failed; trying with the lists that are here" >&2
    as_root "${apt[@]}" install -y --no-install-recommends "${missing[@]}"
fi

cmake --preset cpu -DEPOCH_TESTS=$tests "$@"
cmake --build --preset cpu
