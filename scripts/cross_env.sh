#!/bin/sh
# Make the environment in which the tests run modelexpress and cwtrain: cross_env.sh PYTHON DIRECTORY
# PYTHON's own packages are seen from it, so that torch is not installed twice. Some ten seconds; none if
# it is there already, made from the same.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/environment.sh"
lists=$here/../tests/cross
begin "$1" "$2" "$(cat "$lists/imports.txt" "$lists/packages.txt")"
$pip install --requirement "$lists/imports.txt"
# Not all that they depend on, but what is used of them imports; cwtrain asks for Python 3.12, but that much
# of it runs on 3.11.
$pip install --no-deps --ignore-requires-python --requirement "$lists/packages.txt"
see_outer
finish
