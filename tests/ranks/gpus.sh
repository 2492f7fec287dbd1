#!/usr/bin/env bash
# Several ranks with a GPU each against one: the same tokens, in the exact modes and the plans, by every transport; ranks
# without a sequence; what is refused before NCCL starts; a rank that is killed. Skipped (77) without a GPU.
#   bash tests/ranks/gpus.sh PROGRAM [TRANSPORT ...]      (default: nccl)
# Where there is one GPU the ranks share it, and libnccl_stand_in.so beside PROGRAM takes NCCL's place; other transports
# than nccl are left out then.
set -uo pipefail
program=$1
shift
transports=${*:-nccl}
root=$(cd "$(dirname "$0")/../.." && pwd)
found=$(nvidia-smi --list-gpus 2>/dev/null | grep -c ^GPU)
stand_in=
if [ "$found" -eq 0 ]; then
    echo "skipped: no GPU"
    exit 77
elif [ "$found" -eq 1 ]; then
    stand_in=$(dirname "$program")/libnccl_stand_in.so
    transports=nccl
    echo "one GPU: $stand_in in place of NCCL"
fi
many=$([ "$found" -ge 4 ] || [ "$stand_in" ] && echo 4 || echo 2)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export OPENBLAS_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
bad=0
verdict() { # verdict STATUS TEXT
    [ "$1" -eq 0 ] && echo "ok     $2" || { echo "FAILED $2"; bad=$((bad + 1)); }
}
ranks() { # ranks N ARGUMENT...: the program on N ranks
    local n=$1
    shift
    mpirun -q --bind-to none --oversubscribe ${stand_in:+-x LD_PRELOAD="$stand_in"} -np "$n" "$program" "$@"
}
decode() { # decode NAME RANKS OPTION...: demo questions to NAME.h5
    local name=$1 ranks=$2
    shift 2
    ranks "$ranks" run --model "$root/models/tiny" --out "$scratch/$name.h5" --timeout 60 \
        --data "gsm8k:$root/datasets/samples/gsm8k_demo.jsonl" --progress off --device cuda "$@" >"$scratch/$name.log" 2>&1
    local rc=$?
    [ $rc -eq 0 ] || tail -n 20 "$scratch/$name.log"
    return $rc
}
same() { # same NAME OTHER: token for token
    python3 "$root/tests/tools/same_tokens.py" "$scratch/$1.h5" "$scratch/$2.h5"
}
refused() { # refused TEXT RANKS OPTION...: exit 2, and the message holds TEXT
    local text=$1 ranks=$2 said rc
    shift 2
    said=$(stand_in= ranks "$ranks" run --model "$root/models/tiny" --out "$scratch/refused.h5" --timeout 60 \
        --data "gsm8k:$root/datasets/samples/gsm8k_demo.jsonl" --device cuda "$@" 2>&1)
    rc=$?
    [ $rc -eq 2 ] && [[ $said == *"$text"* ]]
    verdict $? "refused: $text"
    [ $rc -eq 2 ] || echo "status $rc: $said"
}
ended() { # ended SIGNAL STATUS TEXT OPTION...: rank 1 gets it in mid-run; all ranks are gone soon, with status and message
    local signal=$1 want=$2 text=$3 rc job from left
    shift 3
    rm -rf "$scratch"/ended.h5*
    mpirun -q --bind-to none --oversubscribe ${stand_in:+-x LD_PRELOAD="$stand_in"} -np 2 "$program" run --mode full \
        --model "$root/models/tiny" --out "$scratch/ended.h5" --timeout 3 \
        --data "gsm8k:$root/datasets/samples/gsm8k_demo.jsonl" --batch 2 --progress off --device cuda "$@" >"$scratch/ended.log" 2>&1 &
    job=$!
    from=$SECONDS
    until [ "$(wc -c 2>/dev/null <"$scratch"/ended.h5.d/s0000.r00001.jnl || echo 0)" -gt 1000 ] ||
        [ $((SECONDS - from)) -gt 40 ]; do sleep .1; done
    kill -"$signal" "$(pgrep -P $job | tail -n 1)"
    from=$SECONDS
    wait $job
    rc=$?
    left=$(pgrep -f "$scratch/ended.h5" | wc -l)
    [ $rc -eq "$want" ] && [ $((SECONDS - from)) -le 20 ] && [ "$left" -eq 0 ] && { [ -z "$text" ] || grep -q "$text" "$scratch/ended.log"; }
    verdict $? "rank 1 gets $signal ($*): status $rc after $((SECONDS - from)) s, $left processes left"
    cat "$scratch/ended.log"
}

for mode in full epoch; do
    decode one-$mode 1 --mode $mode --batch 64 || verdict 1 "one GPU, $mode"
    for transport in $transports; do
        decode two-$mode-$transport 2 --mode $mode --batch 64 --transport $transport && same one-$mode two-$mode-$transport
        verdict $? "$mode: two ranks by $transport give the tokens of one"
    done
done
if [ "$many" -gt 2 ]; then
    decode many "$many" --mode epoch --batch 64 ${stand_in:+--transport nccl} && same one-epoch many
    verdict $? "epoch: $many ranks give the tokens of one"
fi
decode one-alone 1 --mode epoch --limit 6 --batch 1 || verdict 1 "one GPU, one sequence"
for transport in $transports; do
    decode two-alone-$transport 2 --mode epoch --limit 6 --batch 1 --transport $transport && same one-alone two-alone-$transport
    verdict $? "a rank without a sequence, by $transport"
    decode two-uneven-$transport 2 --mode epoch --limit 6 --batch 5 --transport $transport && same one-alone two-uneven-$transport
    verdict $? "3 sequences and 2, by $transport"
    decode two-seen-$transport 2 --mode epoch --limit 6 --batch 3 --transport $transport --audit --trace &&
        same one-alone two-seen-$transport
    verdict $? "audited and traced, by $transport"
    decode two-half-$transport 2 --mode full --limit 50 --batch 16 --transport $transport --combine bf16
    verdict $? "partial sums in bf16, by $transport"
    ended KILL 137 "" --transport $transport
    ended STOP 3 "the others wait for rank 1/2" --transport $transport
done
chosen() { # chosen NAME TEXT: what auto says that it took, and the tokens of one rank
    decode "auto-$1" 2 --mode epoch --limit 6 --batch 3 && same one-alone "auto-$1" && grep "^transport    $2" "$scratch/auto-$1.log"
    verdict $? "auto: $1"
}
windows="NCCL makes no window here"
if [ "$stand_in" ]; then
    chosen "no windows" "nccl; not lsa: .*$windows"
else
    chosen "windows" "lsa$"
    NCCL_CUMEM_ENABLE=0 chosen "no windows" "nccl; not lsa: .*$windows"
fi
for transport in nccl lsa; do
    stand_in= decode lone-$transport 1 --mode epoch --limit 6 --batch 1 --transport $transport && same one-alone lone-$transport
    verdict $? "one rank by $transport"
done
broken() { # broken HOW STATUS TEXT OPTION...: the stand-in errs
    local how=$1 want=$2 text=$3 rc
    shift 3
    STAND_IN=$how decode broken 2 "$@" >/dev/null
    rc=$?
    [ $rc -eq "$want" ] && grep -q -- "$text" "$scratch/broken.log"
    verdict $? "NCCL, $how: status $rc, $(tail -n 1 "$scratch/broken.log")"
    rm -rf "$scratch"/broken.h5*
}
if [ "$stand_in" ]; then
    broken version 2 "the program was built with the headers of NCCL"
    broken hangs 3 "the start of NCCL is not over after 2 s (--connect-timeout)" --connect-timeout 2
    broken fails 3 "rank 1/2: ncclGroupEnd: remote" --transport nccl
fi
[ "$found" -gt 1 ] && refused "would share a GPU, $found are visible" $((found + 1))
CUDA_VISIBLE_DEVICES=0 refused "ranks 0 and 1 of host" 2
refused "want auto or nccl" 2 --transport self
[ $bad -eq 0 ]
