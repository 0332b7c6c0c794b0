from __future__ import annotations

from pathlib import Path

import pytest

from syncline.demo.base import write_base
from syncline.demo.config import DemoConfig
from syncline.demo.models import load_model, load_tokenizer, require
from syncline.errors import ConfigError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def test_a_missing_package_is_named_with_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"package a-package.*pip install 'syncline\[demo\]'"):
        require("no_such_module_at_all", "a-package")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a Hugging Face checkpoint"):
        load_model(tmp_path, torch.bfloat16)
    with pytest.raises(ConfigError, match="expected a tokenizer in"):
        load_tokenizer(tmp_path)


def test_any_checkpoint_directory_can_be_the_base(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A model that is stored in FP32 becomes a BF16 checkpoint with its tokenizer, uncut."""
    source = tmp_path / "source"
    load_model(tiny_checkpoint, torch.float32).save_pretrained(source)
    load_tokenizer(tiny_checkpoint).save_pretrained(source)
    phases: list[str] = []

    base = write_base(DemoConfig(model=source), tmp_path / "base", phases.append)

    assert (base.vocabulary, base.vocabulary_before, base.is_dithered) == (98, 98, False)
    assert phases == [f"converting {source} to BF16"]
    written = load_model(tmp_path / "base", "auto")
    expected = dict(load_model(tiny_checkpoint, torch.bfloat16).named_parameters())
    for name, parameter in written.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, expected[name])
    assert load_tokenizer(tmp_path / "base").encode("3+4=") == load_tokenizer(source).encode("3+4=")


def test_the_tiny_tokenizer_spells_out_and_reads_back(tiny_checkpoint: Path) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    ids = tokenizer.encode("1+1=2\n~ A")
    assert len(ids) == 9
    assert tokenizer.decode(ids) == "1+1=2\n~ A"
