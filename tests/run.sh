#!/usr/bin/env bash
# All tests that need no GPU and few minutes: set-up, the optimised build with every test, a build under the address and
# undefined-behaviour sanitizers with the unit tests and a small run, and the CUDA backend compiled where there is nvcc.
# The last line counts them all; the exit code agrees.
set -uo pipefail
cd "$(dirname "$0")/.."
. jobs/local.sh
passed=0 failed=0 skipped=0

verdict() {
    [ $skipped -gt 0 ] && echo "$skipped skipped, each with its reason above"
    echo "$passed passed, $failed failed"
    [ $failed -eq 0 ] && [ $passed -gt 0 ]
    exit
}
must() { # a step without which nothing can be tested
    "$@" && return
    echo "failed: $*" >&2
    failed=$((failed + 1))
    verdict
}
count() { grep -om1 "[[:space:]]$2=\"[0-9]*" "$1" | tr -dc 0-9; } # a number in the report's first element
suite() { # suite PRESET REPORT: runs its tests and adds them up
    rm -f "$2"
    ctest --preset "$1" --parallel "$(nproc)" --no-tests=error --output-junit "$2"
    local rc=$? tests bad skip
    if [ ! -s "$2" ]; then
        failed=$((failed + 1))
        return
    fi
    tests=$(count "$2" tests) bad=$(count "$2" failures) skip=$(count "$2" skipped)
    [ $rc -ne 0 ] && [ "$bad" -eq 0 ] && bad=1
    passed=$((passed + tests - bad - skip)) failed=$((failed + bad)) skipped=$((skipped + skip))
}

cuda() { # there need be no GPU to compile for one
    export PATH=$PATH:/usr/local/cuda/bin
    if ! command -v nvcc >/dev/null; then
        echo "no nvcc: the CUDA backend is not compiled"
        skipped=$((skipped + 1))
    elif cmake --preset cuda -DEPOCH_WERROR=ON && cmake --build --preset cuda; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
    fi
}

must bash jobs/setup.sh --tests -DEPOCH_WERROR=ON
suite cpu "$PWD/build/tests.xml"
must cmake --preset debug -DEPOCH_WERROR=ON
must cmake --build --preset debug
suite debug "$PWD/build-debug/tests.xml"
cuda
verdict
