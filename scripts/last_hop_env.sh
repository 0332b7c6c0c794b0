#!/bin/sh
# Make the environment in which checkpoint-engine runs on a CPU: last_hop_env.sh PYTHON DIRECTORY
# PYTHON's own packages (torch, Syncline itself) are seen from it. Half a minute; none if it is there already,
# made from the same. Mooncake also needs Debian's libibverbs1, libnl-3-200 and libnl-route-3-200.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/environment.sh"
packages=$here/../tests/last_hop/packages.txt
begin "$1" "$2" "$(cat "$packages" "$0")"
# Seen before pip looks, which then leaves out what is there: torch first of all.
see_outer
$pip install --requirement "$packages"
finish
