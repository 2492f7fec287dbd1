# Sourced by tests/device.sh and tests/scale.sh, in the repository's root: the libraries and parts of their runs. They set
# $out (folder of the logs), $build, $parts, $end (seconds that are left), and read bad and summary.
export OPENBLAS_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
if [ -d .device/usr ]; then
    here=$PWD/.device/usr
    export PKG_CONFIG_PATH=$here/lib/x86_64-linux-gnu/pkgconfig LD_LIBRARY_PATH=$here/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    command -v pkg-config >/dev/null || { export PKG_CONFIG=$here/bin/pkgconf; }
fi
summary=()
bad=0
wanted() { [[ " $parts " == *" $1 "* ]]; }
part() { # part NAME SECONDS COMMAND...: runs it with a limit, keeps its log, shows the log's end
    local name=$1 limit=$2 rc start=$SECONDS verdict=passed
    shift 2
    [ $((end - SECONDS)) -lt "$limit" ] && limit=$((end - SECONDS))
    [ "$limit" -lt 5 ] && limit=5
    timeout -k 5 "$limit" bash -o pipefail -c '"$@"' part "$@" >"$out/$name.log" 2>&1
    rc=$?
    [ $rc -eq 77 ] && verdict=skipped
    [ $rc -eq 124 ] && verdict="failed (over $limit s)"
    [ $rc -ne 0 ] && [ $rc -ne 77 ] && [ $rc -ne 124 ] && verdict="failed (status $rc)"
    [[ $verdict == failed* ]] && bad=$((bad + 1))
    echo "---- $name: $verdict"
    local show=${SHOW:-12}
    [[ $verdict == passed || $show -gt 40 ]] || show=40
    tail -n "$show" "$out/$name.log"
    summary+=("$(printf '%-28s %-24s %4d s' "$name" "$verdict" $((SECONDS - start)))")
}

pc() { # pc NAME LIBRARY HEADER: a pkg-config file for a library that the system has without one
    ${PKG_CONFIG:-pkg-config} --exists "$1" && return
    local folder
    folder=$(dirname "$(find /usr/include /usr/local/include -name "$3" -print -quit)")
    mkdir -p "$build/pc"
    printf 'Name: %s\nDescription: %s\nVersion: 0\nLibs: -l%s\nCflags: -I%s\n' "$1" "$1" "$2" "$folder" >"$build/pc/$1.pc"
    export PKG_CONFIG_PATH=$PWD/$build/pc${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
}
