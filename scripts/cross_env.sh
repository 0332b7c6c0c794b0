#!/bin/sh
# Make the environment in which the tests run modelexpress and cwtrain: cross_env.sh PYTHON DIRECTORY
# PYTHON's own packages are seen from it, so that torch is not installed twice. Some ten seconds; none if
# it is there already, made from the same.
set -eu
python=$1
target=$2
here=$(cd "$(dirname "$0")/../tests/cross" && pwd)
outer=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
made_from=$(cat "$here/imports.txt" "$here/packages.txt"; echo "$outer")
if [ -f "$target/.made-from" ] && [ "$made_from" = "$(cat "$target/.made-from")" ]; then
    touch "$target/.made-from"
    exit 0
fi
rm -rf "$target"
"$python" -m venv "$target"
pip="$target/bin/python -m pip --quiet --disable-pip-version-check"
$pip install --requirement "$here/imports.txt"
# Not all that they depend on, but what is used of them imports; cwtrain asks for Python 3.12, but that much
# of it runs on 3.11.
$pip install --no-deps --ignore-requires-python --requirement "$here/packages.txt"
echo "$outer" > "$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
echo "$made_from" > "$target/.made-from"
