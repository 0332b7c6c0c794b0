from __future__ import annotations

import pytest

from syncline.errors import FormatError
from syncline.format import names


def test_version_directories_read_back() -> None:
    for version in (1, 999_999, 1_000_000, names.MAX_INTEGER):
        assert names.version_of(names.version_dir(version)) == version


@pytest.mark.parametrize(
    "directory",
    [
        "weight_v000000",
        "weight_v1",
        "weight_v0000001",
        "weight_v00000a",
        "weight_v000001 ",
        "weight_v\u0660\u0660\u0660\u0660\u0660\u0661",
        "weight_v9999999999999999999",
        "xweight_v000001",
        "",
    ],
)
def test_other_directories_are_no_versions(directory: str) -> None:
    assert names.version_of(directory) is None


def test_keys_and_parts() -> None:
    assert names.key(3, names.MANIFEST) == "weight_v000003/manifest.json"
    assert names.part_name(1, 12) == "model-00001-of-00012.safetensors"


@pytest.mark.parametrize(
    "path", ["config.json", "tokenizer.model", "a b", "é" * 127, "x.safetensors2"]
)
def test_plain_file_names_are_legal(path: str) -> None:
    names.check_file(path, "files[0].path")


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "../config.json",
        "/etc/passwd",
        "a/b",
        "a\\b",
        ".hidden",
        "nul\0byte",
        "new\nline",
        "\x7f",
        "\x85",
        "é" * 128,
        "\ud800",
        "HEAD.json",
        "manifest.json",
        "tensors.json.zst",
        "model.safetensors.index.json",
        "model-00000-of-00001.safetensors",
    ],
)
def test_file_names_that_could_do_harm_are_refused(path: str) -> None:
    with pytest.raises(FormatError, match=r"^files\[0\]\.path must be|must not be"):
        names.check_file(path, "files[0].path")


@pytest.mark.parametrize("name", ["", "__metadata__", "é" * 2049, "\udfff"])
def test_tensor_names_that_no_part_can_hold_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match=r"^tensors\[0\]\.name must be"):
        names.check_tensor(name, "tensors[0].name")


@pytest.mark.parametrize("name", ["model.norm.weight", "é" * 2048, "a\nb", "../x"])
def test_any_other_tensor_name_is_legal(name: str) -> None:
    names.check_tensor(name, "tensors[0].name")
