#!/usr/bin/env bash
# Everything that needs a GPU, in one go on a machine that has one: builds, runs the twin and golden tests and the demo on
# the GPU, the small tests under compute-sanitizer, then the benchmarks. A part that fails does not stop the others. The
# last lines are one a part; the exit status is 0 if all passed. Part gpus ends with the goals for two GPUs, some of which
# part lane measures: a goal that is missed fails nothing.
#   bash tests/device.sh [PART ...]     of: build twin golden sanitizer bench lane ranks gpus demo kernels   (default: all)
# All of it ends within LIMIT seconds (default 540): a part has its own limit, and what is left of this one.
# Logs go to $OUT (default: device-out). Libraries that the machine lacks come from .device (tests/device_pack.sh).
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-device-out}
build=build-device
mkdir -p "$out"
parts=${*:-build twin golden sanitizer bench lane ranks gpus demo kernels}
end=${LIMIT:-540}
. tests/device_env.sh
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)

build_all() { # what the parts below run
    local tests
    tests=$(basename -s .c tests/twin/test_cuda*.c tests/golden/test_cuda*.c)
    cmake -S . -B $build -G Ninja -DEPOCH_CUDA=ON ${PKG_CONFIG:+-DPKG_CONFIG_EXECUTABLE="$PKG_CONFIG"} &&
        cmake --build $build -j "$(nproc)" --target epoch bench_cuda $tests &&
        { ! grep -q EPOCH_NCCL:BOOL=ON $build/CMakeCache.txt || cmake --build $build --target nccl_stand_in test_lane_cuda; }
}
gpu_tests() { # gpu_tests FOLDER: every test_cuda*.c there, one after the other
    local rc=77 one test
    for test in tests/"$1"/test_cuda*.c; do
        test=$(basename "$test" .c)
        echo "== $test"
        "$build/$test" 2>&1
        one=$?
        [ $one -eq 0 ] && [ $rc -eq 77 ] && rc=0
        [ $one -ne 0 ] && [ $one -ne 77 ] && rc=1
    done
    return $rc
}
transports="nccl lsa"
modes="full epoch no-atlas no-lsp" # no-lane computes more and takes what epoch takes: the same answers
samples=datasets/samples
demo_data() { # demo_data FOLDER: what there is to decode
    local language
    echo "--data gsm8k:$1/gsm8k_demo.jsonl"
    for language in de en es fr ja zh; do echo "--data mgsm:$1/mgsm_$language.tsv"; done
}
run_demo() { # run_demo NAME DATA OPTION...: decodes it; what is wrong goes to NAME.wrong, the rest to NAME.log
    local name=$build/demo/$1 data=$2
    shift 2
    rm -rf "$name".*
    $build/epoch run --model models/tiny $data --out "$name.h5" --batch 128 --progress off "$@" >"$name.log" &&
        { $build/epoch score --list-wrong "$name.h5" || $build/epoch score --no-programs --list-wrong "$name.h5"; } >"$name.scores" &&
        awk '$2 == "numeric" || $2 == "pass@1" { n += $3 } END { print n }' "$name.scores" >"$name.rows" &&
        awk -F'\t' 'list { print $1 "\t" $2 } /^# dataset, id/ { list = 1 }' "$name.scores" | sort >"$name.wrong.new" &&
        mv "$name.wrong.new" "$name.wrong"
    local rc=$?
    rm -rf "$name".h5 "$name".h5.d
    return $rc
}
run_demos() { # run_demos NAME OPTION...: the 550 demo items, then 1300 that were made in the same way with another seed
    local name=$1
    shift
    run_demo "$name" "$(demo_data $samples) --data humaneval:$samples/humaneval_demo.jsonl" "$@" &&
        run_demo "$name-more" "$(demo_data "$build/demo/data")" "$@"
}
cpu_demos() { # in the background, beside the tests
    for mode in $modes; do
        run_demos "cpu-$mode" --device cpu --mode "$mode" --threads $((($(nproc) + 2) / 5)) >/dev/null 2>"$build/demo/cpu-$mode.errors" &
    done
    wait
}
# paired NAME OTHER: right answers of both, and NAME's less OTHER's over the same items in points, with its 95 % interval;
# fails where they are more than a point apart. NAME: one of run_demo, or "A B" for the items of both
paired() {
    local at=$build/demo n=0 m=0 name a= b=
    for name in $1; do n=$((n + $(cat "$at/$name.rows"))) a+=" $at/$name.wrong"; done
    for name in $2; do m=$((m + $(cat "$at/$name.rows"))) b+=" $at/$name.wrong"; done
    awk '{ print (FILENAME ~ /-more.wrong$/ ? "more " : "") $0 }' $a | sort >"$at/a"
    awk '{ print (FILENAME ~ /-more.wrong$/ ? "more " : "") $0 }' $b | sort >"$at/b"
    comm -3 "$at/a" "$at/b" | awk -F'\t' -v n=$n -v m=$m -v a="$(wc -l <"$at/a")" -v b="$(wc -l <"$at/b")" '
        $1 != "" { less++ } $1 == "" { more++ }
        END {
            d = (more - less) / n
            half = 1.96 * sqrt((more + less) / n - d * d) / sqrt(n)
            printf "%d and %d of %d right, %d alone and %d alone: %+.2f points [%+.2f, %+.2f]\n", n - a, m - b, n, more, less,
                100 * d, 100 * (d - half), 100 * (d + half)
            exit n != m || d > .01 || d < -.01
        }'
}
one_forward_late() { # reports are read one forward late, except with --trace: the same tokens; each with its speed
    local at=$build/demo/late device=${1:-cuda}
    rm -rf "$at".*h5*
    for how in "" --trace; do
        echo "read ${how:+at once}${how:-one forward late}: $($build/epoch run --model models/tiny --data gsm8k:$samples/gsm8k_demo.jsonl \
            --out "$at.${how#--}h5" --batch 32 --progress off --device "$device" $how | grep ^speed)" | sed 's/--trace//' | tr -s ' '
    done
    python3 -c 'import h5py' 2>/dev/null || { echo "tokens are not compared: python3 has no h5py"; return 0; }
    python3 tests/tools/same_tokens.py "$at.h5" "$at.traceh5"
}
# Accuracy on the GPU beside the CPU's: within 1 point. On the 550 samples alone the difference of two runs of like
# accuracy scatters by 0.6 points; so the verdict is that of all 1850.
demo() {
    local rc=0 mode cpu
    for mode in $modes; do
        run_demos "gpu-$mode" --device cuda --mode "$mode" || rc=1
        echo "$mode: $(grep -h '^speed' "$build/demo/gpu-$mode.log" "$build/demo/gpu-$mode-more.log" | tr -s ' ' | tr '\n' ' ')"
    done
    run_demo gpu-no-lane "$(demo_data $samples) --data humaneval:$samples/humaneval_demo.jsonl" --device cuda --mode no-lane || rc=1
    one_forward_late || rc=1
    cmp "$build/demo/gpu-no-lane.wrong" "$build/demo/gpu-epoch.wrong" && echo "no-lane: right and wrong where epoch is" || rc=1
    for mode in $modes; do
        cpu=cpu-$mode
        until [ -e "$build/demo/$cpu-more.wrong" ]; do sleep 1; done
        [ -e "$build/demo/gpu-$mode-more.wrong" ] || continue
        echo "accuracy $mode: GPU and CPU, the samples: $(paired "gpu-$mode" "$cpu")"
        echo -n "accuracy $mode: GPU and CPU, all: "
        paired "gpu-$mode gpu-$mode-more" "$cpu $cpu-more" || rc=1
    done
    return $rc
}
sanitize() { # sanitize TOOL PROGRAM TEST...: single tests by name, 60 s each
    local tool=$1 program=$2 rc=0 test
    shift 2
    for test; do
        echo "== $tool $program $test"
        timeout -k 5 60 "$sanitizer" --tool "$tool" --error-exitcode 9 "$build/$program" "$test" 2>&1 || { echo "status $?"; rc=1; }
    done
    return $rc
}
sanitize_all() {
    local rc=0
    sanitize memcheck test_cuda test_embed test_add_norm test_merge test_norm test_rotate test_route test_support test_no_slots || rc=1
    sanitize racecheck test_cuda test_norm test_rotate || rc=1
    sanitize memcheck test_cuda_kernels test_head test_attention test_experts test_riding test_products || rc=1
    return $rc
}
bench() { # LLaDA2.0-mini: dense at every batch, then at the pace of a real decode
    local rc=0 pace="--schedule tests/bench/schedule.json"
    rm -f "$out"/{full,full1024,epoch,cohorts}.h5
    $build/epoch bench --device cuda --out "$out/full.h5" || rc=1
    $build/epoch bench --device cuda --prefix 1024 --batch 1,512 --iterations 10 --out "$out/full1024.h5" || rc=1
    $build/epoch bench --device cuda --mode full,epoch --cohort 0 --batch 1,128,256,512 --support 64,0 --blocks 2 $pace \
        --out "$out/epoch.h5" || rc=1
    $build/epoch bench --device cuda --mode epoch --cohort 1,8 --batch 128 --support 64 --blocks 1 $pace \
        --out "$out/cohorts.h5" || rc=1
    return $rc
}
lane() { # windows of each other's memory: ranks that share a GPU, then a GPU each
    [ -e $build/test_lane_cuda ] || { echo "skipped: built without NCCL"; return 77; }
    $build/test_lane_cuda || return 1
    [ "$(nvidia-smi --list-gpus | grep -c ^GPU)" -ge 2 ] || return 0
    mpirun -q --bind-to none -np 2 $build/test_lane_cuda && mpirun -q --bind-to none -np 2 $build/test_lane_cuda bench
}
gpus() { # the same shapes on one GPU and on two, by each transport; one that fits two alone; what was asked of them
    local rc=0 transport
    [ "$(nvidia-smi --list-gpus | grep -c ^GPU)" -ge 2 ] || { echo "skipped: takes two GPUs"; return 77; }
    rm -f "$out"/gpus-*.h5
    $build/epoch bench --device cuda --batch-per-rank 1,256 --iterations 10 --out "$out/gpus-one.h5" || rc=1
    for transport in $transports; do
        mpirun -q --bind-to none -np 2 $build/epoch bench --device cuda --batch-per-rank 1,256 --iterations 10 --transport $transport \
            --out "$out/gpus-$transport.h5" || rc=1
    done
    mpirun -q --bind-to none -np 2 $build/epoch bench --device cuda --shape llada2-flash --batch-per-rank 1,64,256 --iterations 6 \
        --out "$out/gpus-flash.h5" || rc=1
    python3 -c 'import h5py' 2>/dev/null || { echo "goals are not judged: python3 has no h5py"; return $rc; }
    python3 tests/tools/gpu_goals.py "$out"
    return $rc
}

echo "# $(date -u +%Y-%m-%dT%H:%MZ), $(git describe --always --dirty 2>/dev/null || echo 'no git')"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>&1
nvcc --version 2>/dev/null | tail -n 1
export out build modes samples transports sanitizer
export -f pc build_all gpu_tests demo_data run_demo run_demos paired one_forward_late demo sanitize sanitize_all bench lane gpus
if wanted build; then
    pc openblas openblas cblas.h
    pc zlib z zlib.h
    SHOW=2 part build 200 build_all
fi
if wanted demo; then
    mkdir -p $build/demo
    PYTHONDONTWRITEBYTECODE=1 python3 models/tiny/training/make_data.py --out $build/demo/data --seed 2 --gsm8k 700 --mgsm 100 --humaneval 50 >/dev/null
fi
wanted demo && cpu_demos &
demos=$!
wanted lane || rm -f "$out/lane.log" # its figures are judged in gpus
wanted twin && part twin 90 gpu_tests twin
wanted golden && part golden 60 gpu_tests golden
wanted sanitizer && part sanitizer 180 sanitize_all
wanted bench && SHOW=150 part bench 200 bench
wanted lane && part lane 100 lane
wanted ranks && SHOW=40 part ranks 210 bash tests/ranks/gpus.sh "$PWD/$build/epoch" $transports
wanted gpus && SHOW=70 part gpus 170 gpus
wanted demo && SHOW=20 part demo 150 demo # late: the CPU needs some minutes for its side
wanted kernels && SHOW=150 part kernels 60 $build/bench_cuda
kill $demos 2>/dev/null
echo
printf '%s\n' "${summary[@]}"
[ $bad -eq 0 ]
