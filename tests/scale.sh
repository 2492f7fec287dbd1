#!/usr/bin/env bash
# The whole node: R ranks with a GPU each, in one call of under nine minutes that ends with one table. A part that fails
# does not stop the others; the exit status is 0 if all passed.
#   bash tests/scale.sh [PART ...]      of: build exact mini flash modes kill   (default: all)
# exact  the exact modes, and epoch, give the tokens of one rank, by every transport
# mini   LLaDA2.0-mini at 64 and 256 sequences a GPU, by every transport, beside one GPU: tokens/s, the lane's share
# flash  LLaDA2.0-flash sharded over the ranks beside its floor, and the largest batch that fits, by every transport
# modes  full, epoch and the ablations at 32 to 512 sequences of the job
# kill   one rank is killed: every process is gone in time, finished rows are safe, the rest is resumed
# RANKS=R ranks (default: the GPUs there are; 2, 4 and 8 in turn, each with an OUT of its own, show how it scales). DRY=1:
# ranks on CPUs with the tiny model and its shape, to test this script.
# Logs and the benchmarks' HDF5 files go to $OUT (default: scale-out); BUILD=DIR holds the program already.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-scale-out}
build=${BUILD:-build-device} cuda=ON
end=${LIMIT:-520}
parts=${*:-build exact mini flash modes kill}
mkdir -p "$out"
. tests/device_env.sh
python=$(for p in python3 /usr/bin/python3; do "$p" -c 'import h5py' 2>/dev/null && echo "$p" && break; done)
[ -n "$python" ] || { echo "no python3 here has h5py (apt-get install python3-h5py)"; exit 2; }
limit_rows=0 deadline=10 schedule="--schedule tests/bench/schedule.json"
if [ -n "${DRY:-}" ]; then
    ranks=${RANKS:-2} device=cpu transports=mpi limit_rows=6 build=${BUILD:-build-dry} cuda=OFF
    mini=models/tiny flash=models/tiny mini_batches=2,4 flash_batches=2 mode_batches=$((2 * ranks)) steps=2 memory=10G
    export OMPI_MCA_mpi_yield_when_idle=1
else
    ranks=${RANKS:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c ^GPU)} device=cuda transports="nccl lsa"
    mini=llada2-mini flash=llada2-flash mini_batches=64,256 flash_batches=8,64,256 mode_batches=32,64,128,256,512 steps=6
    memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
    memory=$((${memory:-80000} * 1048576))
    [ "$ranks" -gt 1 ] || { echo "skipped: takes two GPUs at least, here are $ranks (DRY=1 runs it on CPUs)"; exit 77; }
fi

build_all() {
    cmake -S . -B "$build" -G Ninja -DEPOCH_CUDA=$cuda ${PKG_CONFIG:+-DPKG_CONFIG_EXECUTABLE="$PKG_CONFIG"} &&
        cmake --build "$build" -j "$(nproc)" --target epoch
}
launch() { # launch N ARGUMENT...: the program on N ranks
    local n=$1
    shift
    mpirun -q --bind-to none --oversubscribe -np "$n" "$build/epoch" "$@"
}
decode() { # decode NAME N OPTION...: demo questions to NAME.h5
    local name=$1 n=$2
    shift 2
    rm -rf "$out/$name".h5*
    launch "$n" run --model models/tiny --data gsm8k:datasets/samples/gsm8k_demo.jsonl --limit $limit_rows --batch 64 \
        --out "$out/$name.h5" --progress off --timeout 60 --device $device "$@" >"$out/$name.log" 2>&1 ||
        { tail -n 20 "$out/$name.log"; return 1; }
}
exact() {
    local rc=0 transport i said
    local -a names=(full epoch no-atlas no-lsp) options=("--mode full" "--mode epoch" "--mode no-atlas --refresh 1"
        "--mode no-lsp --atlas-budget 32")
    decode one-full 1 --mode full && decode one-epoch 1 --mode epoch || return
    for transport in $transports; do
        for i in 0 1 2 3; do
            local one=one-full
            [ $i -eq 1 ] && one=one-epoch
            said=$(decode "$transport-${names[i]}" "$ranks" --transport "$transport" ${options[i]} &&
                "$python" tests/tools/same_tokens.py "$out/$one.h5" "$out/$transport-${names[i]}.h5" 2>&1)
            if [ $? -eq 0 ]; then
                echo "exact: $ranks ranks by $transport, ${options[i]}: $said as of one rank"
            else
                echo "exact: $ranks ranks by $transport, ${options[i]}: DIFFERENT: $said"
                rc=1
            fi
        done
    done
    return $rc
}
bench() { # bench NAME N OPTION...: a table to NAME.h5
    local name=$1 n=$2
    shift 2
    rm -f "$out/$name.h5"
    launch "$n" bench --device $device --out "$out/$name.h5" "$@"
}
mini() {
    local rc=0 transport
    bench mini-one 1 --shape $mini --mode full,epoch --cohort 0 --batch-per-rank $mini_batches --blocks 2 $schedule || rc=1
    for transport in $transports; do
        bench "mini-$transport" "$ranks" --transport "$transport" --shape $mini --mode full,epoch --cohort 0 \
            --batch-per-rank $mini_batches --blocks 2 $schedule || rc=1
    done
    return $rc
}
flash() {
    local rc=0 transport folder=models/shapes/$flash
    [ -d "$folder" ] || folder=$flash
    bench flash "$ranks" --shape $flash --batch-per-rank $flash_batches --iterations $steps || rc=1
    for transport in $transports; do
        [ "$transport" = mpi ] && transport=auto
        launch 1 model "$folder" --ranks "$ranks" --gpu-memory "$memory" --context 512 --transport "$transport" |
            sed -n "s/^largest/& by $transport:/p" || rc=1
    done
    return $rc
}
modes() {
    bench modes "$ranks" --shape $mini --mode full,epoch,no-atlas,no-lsp,no-lane --cohort 0 --batch $mode_batches --blocks 2 \
        $schedule
}
kill_one() {
    local job victim from rc left rows
    decode all "$ranks" --mode full || return
    rm -rf "$out"/killed.h5*
    mpirun -q --bind-to none --oversubscribe -np "$ranks" "$build/epoch" run --model models/tiny --mode full --batch "$ranks" \
        --data gsm8k:datasets/samples/gsm8k_demo.jsonl --limit $limit_rows --out "$out/killed.h5" --progress off \
        --commit-every .1 --timeout 60 --device $device >"$out/killed.log" 2>&1 &
    job=$!
    from=$SECONDS
    until [ "$(rows_of killed)" -gt 0 ] || [ $((SECONDS - from)) -gt 40 ]; do sleep .2; done
    victim=$(pgrep -P $job | tail -n 1)
    kill -9 "$victim" || { echo "kill: no rank to kill"; return 1; }
    from=$SECONDS
    wait $job
    rc=$?
    from=$((SECONDS - from))
    left=$(pgrep -f "$out/killed.h5" | wc -l)
    rows=$(rows_of killed)
    decode_resume && "$python" tests/tools/same_tokens.py "$out/all.h5" "$out/killed.h5" &&
        [ $rc -ne 0 ] && [ "$left" -eq 0 ] && [ $from -le $deadline ] && [ "$rows" -gt 0 ]
    local verdict=$?
    echo "kill: status $rc after $from s (at most $deadline), $left processes left, $rows rows safe, resumed to the same tokens"
    return $verdict
}
rows_of() { # rows that are safe
    "$build/epoch" status "$out/$1.h5" 2>/dev/null | awk '$1 == "rows" { n = $2 } END { print n + 0 }'
}
decode_resume() {
    launch "$ranks" run --model models/tiny --mode full --batch "$ranks" --data gsm8k:datasets/samples/gsm8k_demo.jsonl \
        --limit $limit_rows --out "$out/killed.h5" --progress off --timeout 60 --device $device --resume >>"$out/killed.log" 2>&1
}

rm -f "$out"/{mini-one,mini-mpi,mini-nccl,mini-lsa,flash,modes}.h5 "$out"/{exact,mini,flash,modes,kill}.log # no table of old ones
what="$(date -u +%Y-%m-%dT%H:%MZ), $(git describe --always --dirty 2>/dev/null || echo 'no git'), $ranks ranks"
echo "# $what"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null
export out build cuda python ranks device transports limit_rows deadline schedule mini flash mini_batches flash_batches
export mode_batches steps memory
export -f pc build_all launch decode exact bench mini flash modes kill_one rows_of decode_resume
if wanted build && [ -z "${BUILD:-}" ]; then
    pc openblas openblas cblas.h
    pc zlib z zlib.h
    SHOW=2 part build 150 build_all
fi
wanted exact && part exact 150 exact
wanted mini && SHOW=40 part mini 150 mini
wanted flash && part flash 100 flash
wanted modes && SHOW=60 part modes 150 modes
wanted kill && part kill 100 kill_one
echo
echo "# $what"
"$python" tests/tools/scale_table.py "$out" || bad=$((bad + 1))
cat "$out"/exact.log "$out"/flash.log "$out"/kill.log 2>/dev/null | grep -E '^(exact|largest|kill)'
printf '%s\n' "${summary[@]}"
[ $bad -eq 0 ]
