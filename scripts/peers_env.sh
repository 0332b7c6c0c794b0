#!/bin/sh
# Make the environment in which Mooncake and NIXL run on a CPU: peers_env.sh PYTHON DIRECTORY
# PYTHON's own packages (pytest, Syncline itself) are seen from it. Ten seconds; none if it is there already,
# made from the same. Mooncake also needs Debian's libibverbs1, libnl-3-200 and libnl-route-3-200.
set -eu
python=$1
target=$2
packages=$(cd "$(dirname "$0")/../tests/peers" && pwd)/packages.txt
outer=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
made_from=$(cat "$packages" "$0"; echo "$outer")
if [ -f "$target/.made-from" ] && [ "$made_from" = "$(cat "$target/.made-from")" ]; then
    touch "$target/.made-from"
    exit 0
fi
rm -rf "$target"
"$python" -m venv "$target"
site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# addsitedir, not a bare path: Syncline's editable install is itself a .pth file there.
echo "import site; site.addsitedir('$outer')" > "$site/outer.pth"
# Without what they depend on: torch for CUDA, 5 GB, of which nothing here is used.
"$target/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps --requirement "$packages"
echo "$made_from" > "$target/.made-from"
