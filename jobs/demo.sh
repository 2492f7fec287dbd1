#!/usr/bin/env bash
# From nothing to a results file: set-up, build, then 2 ranks decode the demo questions with the tiny model.
#   bash jobs/demo.sh [options of epoch run]
# Every run writes a new file: demo/run1.h5, demo/run2.h5, ...
set -euo pipefail
cd "$(dirname "$0")/.."
bash jobs/setup.sh
. jobs/local.sh

mkdir -p demo
n=1
while [ -e demo/run$n.h5 ] || [ -e demo/run$n.h5.d ]; do
    n=$((n + 1))
done
[ -t 2 ] && progress=bar || progress=lines # a rank's own stderr is mpirun's pipe

set -x
$MPIRUN -np 2 build/epoch run --model models/tiny --data gsm8k:datasets/samples/gsm8k_demo.jsonl \
    --out demo/run$n.h5 --progress $progress "$@"
