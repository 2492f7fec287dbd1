# Sourced by the job files: what depends on the cluster. Edit it once, or set the variables before sbatch.
: "${EPOCH_MODULES:=}" # for `module load`: "openmpi hdf5 cuda nccl"
if [ -n "$EPOCH_MODULES" ]; then
    module load $EPOCH_MODULES
fi

export OPENBLAS_NUM_THREADS=1                          # epoch's own threads do the work
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# export NCCL_SOCKET_IFNAME=ib0                        # the network that NCCL starts over, where it picks a wrong one
: "${EPOCH_MPIRUN:=mpirun -q --bind-to none}"          # ranks are not bound: their threads share the job's cores

: "${EPOCH_HOME:=${SLURM_SUBMIT_DIR:-$PWD}}"           # this repository; sbatch is called in it
: "${EPOCH:=$EPOCH_HOME/build/epoch}"                   # on GPUs: build-cuda/epoch, with EPOCH_OPTIONS="--device cuda"
: "${EPOCH_MODEL:=$EPOCH_HOME/models/tiny}"
: "${EPOCH_OUT_DIR:=$EPOCH_HOME/runs}"
: "${EPOCH_RANKS:=${SLURM_NTASKS:-1}}"
: "${EPOCH_OPTIONS:=}"                                 # further options of `epoch run`: "--device cpu --limit 100"
: "${EPOCH_RESTARTS:=100}"                             # how often a job may put itself back into the queue

# epoch_job OUT.h5 [option ...]: runs or resumes until the time limit, a preemption or the end, and leaves the script.
# Slurm's USR1 (--signal) is passed on: the ranks finish their iteration, publish and stop. A job with rows left puts
# itself back into the queue, since Slurm does not requeue one that ends by itself in its grace time. Whether rows are
# left is asked of `epoch status`: mpirun's exit code says little after a signal.
epoch_job() {
    local out=$1 pid rc standing
    shift
    mkdir -p "$(dirname "$out")"
    trap : TERM # mpirun and its ranks get it too; this shell outlives them to requeue
    $EPOCH_MPIRUN -np "$EPOCH_RANKS" "$EPOCH" run --model "$EPOCH_MODEL" --out "$out" --resume --progress lines "$@" \
        $EPOCH_OPTIONS &
    pid=$!
    trap 'kill -USR1 $pid' USR1
    while :; do # a signal interrupts wait
        wait $pid
        rc=$?
        kill -0 $pid 2>/dev/null || break
    done
    "$EPOCH" status "$out"
    standing=$?
    [ $standing -le 1 ] && exit $standing # done, or done with failed rows
    [ $rc = 2 ] && exit 2                 # bad input: the same again would not help
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "$EPOCH_RESTARTS" ] && scontrol requeue "$SLURM_JOB_ID"; then
        sleep 60 # until Slurm ends this script
    fi
    exit $rc
}
