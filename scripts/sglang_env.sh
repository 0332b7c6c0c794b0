#!/bin/sh
# Make the environment in which SGLang runs on a CPU: sglang_env.sh PYTHON DIRECTORY
# PYTHON's own packages (torch, pytest, Syncline itself) are seen from it, so that torch is not installed
# twice; where SGLang pins another version (transformers, tokenizers) its own comes first. A few minutes;
# none if it is there already, made from the same.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/environment.sh"
begin "$1" "$2" "$(cat "$0" "$here"/sglang_cpu/*.py)"
see_outer
version=0.5.23
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
$pip download --no-deps --dest "$work" "sglang==$version"
# Left out: what needs a GPU or builds for one, and torch itself. Installed without their own
# requirements: what would bring another torch, or a GPU package, along.
"$target/bin/python" - "$work" <<'PYTHON'
import pathlib
import re
import sys
import zipfile

left_out = {
    *("torch", "torchaudio", "torchcodec", "torchvision", "decord2", "av"),
    *("cuda-python", "flash-attn-4", "flashinfer-python", "humming-kernels"),
    *("nvidia-cutlass-dsl", "nvidia-mathdx", "nvshmem4py-cu13", "quack-kernels", "sgl-deep-ep"),
    *("sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel", "tilelang"),
}
bare = {
    *("xgrammar", "compressed-tensors", "datasets", "timm", "kernels", "torch-memory-saver"),
    *("mistral-common", "deepseek-recipe", "tml-renderers", "smg-grpc-servicer", "soundfile"),
    *("outlines", "modelscope", "apache-tvm-ffi"),
}
folder = pathlib.Path(sys.argv[1])
wheel = next(folder.glob("sglang-*.whl"))
with zipfile.ZipFile(wheel) as archive:
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
ordinary, alone = ["jsonschema"], ["torchvision==0.28.0", "triton", "dill", "multiprocess", "loguru"]
for line in lines:
    requirement = line.removeprefix("Requires-Dist: ")
    if requirement == line or "extra ==" in requirement:
        continue
    distribution = re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")
    if distribution not in left_out:
        (alone if distribution in bare else ordinary).append(requirement)
(folder / "ordinary.txt").write_text("\n".join(ordinary) + "\n")
(folder / "alone.txt").write_text("\n".join(alone) + "\n")
PYTHON
$pip install --requirement "$work/ordinary.txt"
$pip install --no-deps --requirement "$work/alone.txt"
$pip install --no-deps "$work"/sglang-*.whl
cp "$here/sglang_cpu/sgl_kernel.py" "$here/sglang_cpu/torchvision_schemas.py" "$site"
echo "import torchvision_schemas" > "$site/torchvision_schemas.pth"
finish
