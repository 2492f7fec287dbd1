#!/usr/bin/env bash
# Collects into a folder (default .device) the C libraries and tools that a bare CUDA machine may lack: PCRE2, utf8proc,
# Jansson, cmocka and pkg-config, from Debian's packages. Nothing is installed. tests/device.sh uses the folder there.
#   bash tests/device_pack.sh [FOLDER]
set -euo pipefail
out=${1:-.device}
packages="libpcre2-8-0 libpcre2-dev libutf8proc2 libutf8proc-dev libjansson4 libjansson-dev libcmocka0 libcmocka-dev
    pkgconf-bin libpkgconf3"
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() { (cd "$work" && apt-get download -q $packages >/dev/null 2>&1); }
fetch || { apt-get update -q >/dev/null && fetch; }
for deb in "$work"/*.deb; do
    dpkg -x "$deb" "$out"
done
rm -rf "$out"/usr/share "$out"/usr/bin/{bomtool,pcre2*} "$out"/usr/lib/x86_64-linux-gnu/*.a
# pkg-config's files say where the libraries lie: in this folder, wherever it is.
sed -i 's|=/usr|=${pcfiledir}/../../..|; s| -\([IL]\)/usr| -\1${pcfiledir}/../../..|' "$out"/usr/lib/x86_64-linux-gnu/pkgconfig/*.pc
du -sh "$out"
