"""Reports with numbers that are easy to recognise, and the tiny checkpoint, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.demo.config import BaseReport, StepReport
from syncline.demo.tiny import write_tiny


@pytest.fixture
def base_report() -> BaseReport:
    return BaseReport(
        model="a model",
        parameters=1000,
        tensors=2,
        vocabulary=98,
        vocabulary_before=262144,
        is_dithered=True,
        compute_dtype="bfloat16",
        full_bytes=2000,
        setup_s=7.0,
    )


@pytest.fixture
def step_report() -> StepReport:
    return StepReport(
        step=1,
        version=2,
        reward=0.25,
        changed=10,
        total=1000,
        payload_bytes=40,
        full_bytes=2000,
        rollout_s=0.5,
        train_s=1.5,
        diff_s=0.001,
        encode_s=0.002,
        publish_s=0.003,
        pull_s=0.004,
        apply_s=0.01,
        verify_s=0.02,
        step_s=2.5,
        sample="1+1=2\n3+4=7\n",
    )


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tiny") / "base"
    write_tiny(target, seed=0)
    return target
