#!/bin/sh
# Make the environment in which megatron-bridge loads checkpoints into megatron-core: bridge_env.sh PYTHON DIRECTORY
# PYTHON's own packages are seen from it, so that torch is not installed twice. Half a minute; none if it is
# there already, made from the same.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/environment.sh"
begin "$1" "$2" "$(cat "$0")"
see_outer
# Both ask for Python 3.12, and megatron-bridge for the packages of all its models and loggers; what is used of
# them here runs on 3.11 without.
$pip install --no-deps --ignore-requires-python megatron-bridge==0.6.2 megatron-core==0.19.2
$pip install 'transformers==5.12.1' 'einops==0.8.2' 'omegaconf==2.3.1' 'hydra-core==1.3.8' six
finish
