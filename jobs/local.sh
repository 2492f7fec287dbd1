# Sourced: mpirun on this one machine, whatever it is.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # root, as in containers: Open MPI wants both
export OMPI_MCA_btl_vader_single_copy_mechanism=none             # reading a neighbour's memory: containers forbid it
export OMPI_MCA_mpi_yield_when_idle=1 # a rank that waits leaves its core to whoever works, other programs too
# More ranks than cores are welcome; a rank's threads may use every core, not only the one it would be bound to.
MPIRUN="mpirun -q --oversubscribe --bind-to none"
