#!/bin/sh
# Make the environment in which megatron-bridge loads checkpoints into megatron-core: bridge_env.sh PYTHON DIRECTORY
# PYTHON's own packages are seen from it, so that torch is not installed twice. Half a minute; none if it is
# there already, made from the same.
set -eu
python=$1
target=$2
outer=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
made_from=$(cat "$0"; echo "$outer")
if [ -f "$target/.made-from" ] && [ "$made_from" = "$(cat "$target/.made-from")" ]; then
    touch "$target/.made-from"
    exit 0
fi
rm -rf "$target"
"$python" -m venv "$target"
pip="$target/bin/python -m pip --quiet --disable-pip-version-check"
site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# addsitedir, not a bare path: Syncline's editable install is itself a .pth file there.
echo "import site; site.addsitedir('$outer')" > "$site/outer.pth"
# Both ask for Python 3.12, and megatron-bridge for the packages of all its models and loggers; what is used of
# them here runs on 3.11 without.
$pip install --no-deps --ignore-requires-python megatron-bridge==0.6.2 megatron-core==0.19.2
$pip install 'transformers==5.12.1' 'einops==0.8.2' 'omegaconf==2.3.1' 'hydra-core==1.3.8' six
echo "$made_from" > "$target/.made-from"
