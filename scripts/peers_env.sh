#!/bin/sh
# Make the environment in which Mooncake and NIXL run on a CPU: peers_env.sh PYTHON DIRECTORY
# PYTHON's own packages (pytest, Syncline itself) are seen from it. Ten seconds; none if it is there already,
# made from the same. Mooncake also needs Debian's libibverbs1, libnl-3-200 and libnl-route-3-200.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/environment.sh"
packages=$here/../tests/peers/packages.txt
begin "$1" "$2" "$(cat "$packages" "$0")"
see_outer
# Without what they depend on: torch for CUDA, 5 GB, of which nothing here is used.
$pip install --no-deps --requirement "$packages"
finish
