#!/usr/bin/env bash
# What takes too long for tests/run.sh. The log of each part's last run is kept in tests/full.log.
#   bash tests/full.sh [PART ...]     of: table demo real kills scale   (default: all)
# table  batch 1, 2, 7, 64 x ranks 1, 2, 3, 4, 7 over 64 prompts: identical token ids and iterations, dense and with all
#        relaxations
# demo   all 550 demo items with the dense executor: accuracy and iterations beside those in models/tiny/README.md
# real   the published benchmark files in $EPOCH_DATA (names: datasets/README.md): every prompt and turn is accounted for
# kills  $EPOCH_KILLS (200) times a rank, all of them or mpirun killed at a random moment, then resumed
# scale  tests/scale.sh, which is for nodes with several GPUs, on 8 CPU ranks
set -uo pipefail
cd "$(dirname "$0")/.."
. jobs/local.sh
bash jobs/setup.sh --tests || exit
parts=${*:-table demo real kills scale}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0
samples=datasets/samples

run() { # run OUT RANKS [option ...]: one line about it
    local out=$1 ranks=$2 text
    shift 2
    text=$($MPIRUN -np "$ranks" build/epoch run --model models/tiny --out "$out" --progress off "$@") || {
        echo "failed with $?: $out, $ranks ranks, $*"
        return 1
    }
    echo "$(basename "$out" .h5), $ranks ranks: $(grep '^speed' <<<"$text" | tr -s ' ')"
}
verdict() { # verdict NAME STATUS
    if [ "$2" -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    echo "$1: $([ "$2" -eq 0 ] && echo passed || echo FAILED)"
}

table() {
    local mode batch ranks bad
    for mode in full epoch; do
        bad=0
        for ranks in 1 2 3 4 7; do
            for batch in 1 2 7 64; do
                run "$work/$mode-batch$batch-ranks$ranks.h5" $ranks --mode $mode --batch $batch --limit 64 \
                    --data gsm8k:$samples/gsm8k_demo.jsonl || bad=1
            done
        done
        /usr/bin/python3 tests/tools/same_tokens.py "$work/$mode"-batch*.h5 || bad=1
        verdict "table, --mode $mode" $bad
    done
}
demo() {
    local data=() language
    for language in de en es fr ja zh; do
        data+=(--data mgsm:$samples/mgsm_$language.tsv)
    done
    run "$work/demo.h5" 2 --mode full --data gsm8k:$samples/gsm8k_demo.jsonl "${data[@]}" \
        --data humaneval:$samples/humaneval_demo.jsonl &&
        build/epoch score "$work/demo.h5" >/dev/null && /usr/bin/python3 tests/tools/demo_figures.py "$work/demo.h5"
    verdict "demo" $?
}
real() {
    if [ -z "${EPOCH_DATA:-}" ]; then
        echo "real: skipped, EPOCH_DATA names no folder"
        return
    fi
    local data=() language text
    for language in bn de en es fr ja ru sw te th zh; do
        data+=(--data "mgsm:$EPOCH_DATA/mgsm/mgsm_$language.tsv")
    done
    run "$work/real.h5" 2 --batch 64 --gen-len 64 --data "gsm8k:$EPOCH_DATA/gsm8k/test.jsonl" "${data[@]}" \
        --data "humaneval:$EPOCH_DATA/humaneval/HumanEval.jsonl.gz" --data "mtbench:$EPOCH_DATA/mt_bench/question.jsonl"
    text=$(build/epoch status "$work/real.h5" | grep '^rows')
    echo "$text"
    grep -q "4393 of 4393 done, 0 failed, 0 left" <<<"$text"
    verdict "real" $?
}
kills() {
    EPOCH_KILLS=${EPOCH_KILLS:-200} OPENBLAS_NUM_THREADS=1 \
        /usr/bin/python3 tests/cli/test_survive.py "$PWD/build/epoch" test_kills test_more_kills
    verdict "kills" $?
}

scale() {
    DRY=1 RANKS=8 BUILD=build OUT=$work/scale bash tests/scale.sh | sed -n '/^$/,$p'
    verdict "scale" "${PIPESTATUS[0]}"
}

where="$(date -u +%F), $(git describe --always --dirty), $(nproc) cores, $(sed -n 's/^model name[[:space:]]*: //p;T;q' /proc/cpuinfo)"
[ -f tests/full.log ] && awk -v parts=" $parts " '/^## / { drop = index(parts, " " $2 " ") } !drop' tests/full.log >"$work/log"
for part in $parts; do
    echo "## $part $where" | tee -a "$work/log"
    $part >"$work/part" 2>&1
    tee -a "$work/log" <"$work/part"
    cp "$work/log" tests/full.log
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
