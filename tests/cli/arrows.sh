#!/usr/bin/env bash
# The arrows between the rooms: which file may include which. Also: no file names the machine it was written on.
#   bash tests/cli/arrows.sh [REPOSITORY]
set -uo pipefail
cd "${1:-$(dirname "$0")/../..}"
bad=0
complain() {
    echo "$*"
    bad=$((bad + 1))
}

seams='src/(backend|lane|world|slot)\.h'
base='src/base/'
below="$seams|$base|src/model/|src/plan/|src/exec/|datasets/|results/"
may() { # what FILE may include from this repository
    case $1 in
    src/base/*) echo "$base" ;;
    src/backend.h | src/lane.h | src/world.h | src/slot.h) echo "$seams|$base" ;;
    src/cpu/*) echo "$seams|$base|src/cpu/" ;;
    cuda/*) echo "$seams|$base|cuda/" ;;
    mpi/lane_nccl.* | mpi/lane_lsa.* | mpi/comm_nccl.*) echo "$seams|$base|mpi/|cuda/" ;;
    mpi/*) echo "$seams|$base|mpi/" ;;
    datasets/*) echo "$base|datasets/" ;;
    results/*) echo "$base|results/" ;;
    src/model/weights.*) echo "src/backend\.h|$base|src/model/" ;; # it loads into the backend's memory
    src/model/*) echo "$base|src/model/" ;;
    src/plan/*) echo "src/(backend|slot)\.h|$base|src/model/|src/plan/" ;; # the rules that it fills in live there
    src/exec/*) echo "src/(backend|lane|slot)\.h|$base|src/model/|src/plan/|src/exec/" ;;
    src/transport.*) echo "$seams|$base|src/options\.h|src/transport\.h|mpi/gpu_start\.h" ;;
    src/*) echo "$below|src/[a-z]+\.h" ;; # the top: the run and its options
    esac
}
foreign() { # who may include a library's header
    case $1 in
    mpi.h) echo 'mpi/' ;;
    hdf5*.h | H5*.h) echo 'results/' ;;
    cblas.h) echo 'src/cpu/dense\.c$' ;;
    cuda*.h | cublas*.h | cuda/*) echo 'cuda/|mpi/(lane_nccl|lane_lsa|lsa_window|comm_nccl)\.' ;;
    nccl*.h) echo 'mpi/(lane_nccl|lane_lsa|lsa_window|comm_nccl)\.' ;;
    pcre2.h | utf8proc.h) echo 'src/model/' ;;
    zlib.h) echo 'datasets/|results/' ;;
    *) echo '.' ;;
    esac
}

files=$(find src cuda mpi datasets results -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null | sort)
includes=0
for file in $files; do
    allowed=$(may "$file")
    while read -r line kind name; do
        includes=$((includes + 1))
        if [ "$kind" = '"' ]; then
            [ -f "$name" ] || [ -f "${name/%_py.h/.py}" ] || # the build makes the one from the other
                complain "$file:$line: \"$name\" is not a path from the repository's root"
            [[ $name =~ ^($allowed) ]] || complain "$file:$line: includes $name, may include only $allowed"
        else
            owners=$(foreign "$name")
            [[ $file =~ ^($owners) ]] || complain "$file:$line: includes <$name>, which is for $owners only"
        fi
    done < <(sed -nE 's/^ *# *include *(["<])([^">]*)[">].*/\1 \2/;T;=;p' "$file" | paste -d' ' - -)
done
[ "$includes" -gt 0 ] || complain "no include was found: where is the source?"

# Also folders beside the repository. The bracketed letters keep this file from finding itself.
machine='(^|[^a-zA-Z0-9_.-])/([w]ork|[r]oot|[h]ome)/|/tmp/[b]uild|([d]ebian\.org|[u]buntu\.com|[p]ypi\.|[p]ythonhosted)'
machine+='|[s]hared/(models|datasets|training|reference)'
while IFS= read -r hit; do
    complain "$hit: names a machine's path or a package host"
done < <(find . \( -path './build*' -o -path ./.git -o -path ./demo -o -path ./.device \) -prune -o -type f -print0 |
             xargs -0 grep -nIoE "$machine" | cut -c 3-)

[ $bad -eq 0 ] && echo "arrows: $includes includes in order" || echo "arrows: $bad out of order"
[ $bad -eq 0 ]
