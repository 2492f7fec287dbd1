#!/usr/bin/env bash
# The long tests: more of what tests/run.sh does at random, on the build that it leaves.
#   bash tests/full.sh [KILLS]
set -uo pipefail
cd "$(dirname "$0")/.."
. jobs/local.sh
export OMPI_MCA_rmaps_base_oversubscribe=1 OPENBLAS_NUM_THREADS=1
EPOCH_KILLS=${1:-200} /usr/bin/python3 tests/cli/test_survive.py build/epoch test_kills test_more_kills
