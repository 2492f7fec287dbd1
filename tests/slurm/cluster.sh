#!/usr/bin/env bash
# A real Slurm for tests, private to DIR: munged, slurmctld and one slurmd in the background, as root.
#   cluster.sh start DIR      . DIR/env.sh  then sbatch as usual; exit 77 with the reason where that cannot be
#   cluster.sh stop DIR       cancels its jobs and ends its daemons
# It listens on 127.0.0.1, needs neither systemd nor cgroups nor accounting, and touches nothing outside DIR. One node
# of 4 simulated CPUs. Partitions: main; low, whose jobs urgent may preempt (they are requeued after 15 s of grace).
set -uo pipefail
PATH=$PATH:/usr/sbin:/sbin
[ $# -eq 2 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
mkdir -p "$2" || exit 1
dir=$(cd "$2" && pwd -P)
export SLURM_CONF=$dir/slurm.conf

began() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; } # a pid's start time: numbers are used again
alive() { [ -n "$2" ] && [ "$(began "$1")" = "$2" ] && ! grep -q ') Z' "/proc/$1/stat" 2>/dev/null; }

stop() {
    local name pid at n
    [ -e "$dir/pids" ] || return 0
    timeout 10 scancel --quiet --full --signal=KILL --user=root 2>/dev/null
    timeout 10 scancel --quiet --user=root 2>/dev/null
    for n in $(seq 50); do
        [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break
        sleep .2
    done
    while read -r name pid at; do # slurmd first, munged last: in the order of their lines from behind
        alive "$pid" "$at" && kill -TERM "$pid"
        for n in $(seq 50); do
            alive "$pid" "$at" || break
            sleep .1
        done
        alive "$pid" "$at" && kill -KILL "$pid"
    done < <(tac "$dir/pids")
    for pid in /proc/[0-9]*; do # what is left of this cluster's jobs, and of those alone
        name=$(cat "$pid/comm" 2>/dev/null)
        tr '\0' '\n' 2>/dev/null <"$pid/environ" | grep -qxF "SLURM_CONF=$SLURM_CONF" || continue
        if [ "$name" = slurmstepd ] || tr '\0' '\n' 2>/dev/null <"$pid/environ" | grep -q '^SLURM_JOB_ID='; then
            kill -KILL "${pid#/proc/}" 2>/dev/null
        fi
    done
    rm -f "$dir/pids"
}
if [ "$1" = stop ]; then
    stop
    exit 0
fi
skip() {
    echo "skipped: $*"
    exit 77
}
fail() {
    echo "$*" >&2
    tail -n 5 "$dir"/log/* >&2
    stop
    exit 1
}
for tool in munged slurmctld slurmd sbatch; do
    command -v $tool >/dev/null || skip "no $tool (Debian: slurmctld slurmd slurm-client munge)"
done
[ "$(id -u)" = 0 ] || skip "a Slurm of its own wants root"
[ ${#dir} -le 80 ] || skip "$dir is too long for a socket's path" # 107 bytes

mkdir -p "$dir"/{run,log,key,state/ctld,state/node}
chmod 700 "$dir/key" "$dir/log"
port=$((20000 + $$ % 1000 * 10))
free_port() {
    while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
        port=$((port + 1))
    done
    echo $port
}
host=$(hostname -s)
control=$(free_port)
port=$((control + 1))
node=$(free_port)
cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$control
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# a requeued job waits cred_expire seconds
AuthInfo=socket=$dir/run/munge.socket,cred_expire=5
CredType=cred/munge
MailProg=/bin/true
StateSaveLocation=$dir/state/ctld
SlurmdSpoolDir=$dir/state/node
TmpFS=$dir/run
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
JobRequeue=1
KillWait=5
MinJobAge=3600
ReturnToService=2
InactiveLimit=0
Waittime=0
NodeName=$host NodeHostname=$host NodeAddr=127.0.0.1 Port=$node CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=4096
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=$host MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=15
PartitionName=urgent Nodes=$host MaxTime=INFINITE PriorityTier=100 PreemptMode=OFF
CONF
echo "export SLURM_CONF=$SLURM_CONF PATH=\$PATH:/usr/sbin:/sbin" >"$dir/env.sh"

: >"$dir/pids"
daemon() { # daemon NAME COMMAND...
    local name=$1
    shift
    setsid "$@" </dev/null >>"$dir/log/$name.out" 2>&1 &
    sleep .1
    echo "$name $! $(began $!)" >>"$dir/pids"
}
wait_for() { # wait_for SECONDS COMMAND...
    local n=$(($1 * 10))
    shift
    until "$@" >/dev/null 2>&1; do
        n=$((n - 1))
        [ $n -gt 0 ] || return 1
        sleep .1
    done
}
idle() { [ -n "$(sinfo -h -p main -t idle -o %N)" ]; }

(umask 077 && head -c 1024 /dev/urandom >"$dir/key/key")
daemon munged munged --foreground --force --key-file="$dir/key/key" --socket="$dir/run/munge.socket" \
    --pid-file="$dir/run/munged.pid" --log-file="$dir/log/munged.log" --seed-file="$dir/key/seed" --num-threads=2
wait_for 10 munge --socket="$dir/run/munge.socket" -n || fail "munged did not come up"
daemon slurmctld slurmctld -D -c -f "$SLURM_CONF"
wait_for 20 scontrol ping || fail "slurmctld did not come up"
daemon slurmd slurmd -D -c -N "$host" -f "$SLURM_CONF"
wait_for 30 idle || fail "the node did not come up"
