#!/usr/bin/env bash
# The demo beside its products alone: 48 questions at 1 rank, at 1 rank with 2 threads, and at 2 ranks.
#   bash tests/bench/demo_vs_blas.sh [BUILD [options of epoch run]]
# wall/blas of a rank alone is what its products cost above plain BLAS; under 2 ranks it holds the waiting for the other too.
set -euo pipefail
cd "$(dirname "$0")/../.."
. jobs/local.sh
build=${1:-build}
shift || true
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for shape in "1 1" "1 2" "2 1"; do
    read -r ranks threads <<<"$shape"
    echo "== $ranks ranks, $threads threads"
    $MPIRUN -np $ranks "$build/demo_vs_blas" --model models/tiny --data gsm8k:datasets/samples/gsm8k_demo.jsonl --limit 48 \
        --threads $threads --weights f32 --mode full --progress off --out "$out/$ranks$threads.h5" "$@" |
        grep -E '^speed|^#|^ +(rank|[0-9])'
done
