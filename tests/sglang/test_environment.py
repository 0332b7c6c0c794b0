"""The environment of `make sglang-env`: SGLang's own model classes load in a process without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang.srt", reason="needs the environment of make sglang-env")


def test_the_versions_are_those_that_sglang_pins() -> None:
    import sglang
    import transformers

    assert sglang.__version__ == "0.5.23"
    assert transformers.__version__ == "5.19.0"


def test_an_absent_kernel_says_its_name() -> None:
    import sgl_kernel
    from sgl_kernel.scalar_type import scalar_types

    assert scalar_types.int4 != scalar_types.int8
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.silu_and_mul"):
        sgl_kernel.silu_and_mul()
