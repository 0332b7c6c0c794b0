"""A vLLM that sees: an image that it has seen with old weights is seen with the new ones after a commit."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np
import pytest

from syncline.vllm.commit import CommitOptions, bring
from syncline.vllm.control import OfflineControl
from vllm_engines import engine
from vllm_models import IMAGE_SIZE, IMAGE_TOKEN, NEWLINE, write_vision_checkpoint
from vllm_trainer import Trainer

_SPEC = find_spec("vllm")
pytestmark = [
    pytest.mark.skipif(
        _SPEC is None or _SPEC.origin is None, reason="no vLLM here: make test-vllm"
    ),
    pytest.mark.slow,
]

PROMPT = [4 + (7 * i * i + 3 * i) % 90 for i in range(300)]
TOKENS = 8


class Seeing:
    """An engine in this process, the trainer that it follows, and one image."""

    def __init__(self, llm: Any, trainer: Trainer) -> None:
        from PIL import Image

        self.llm, self.trainer = llm, trainer
        self.control = OfflineControl(llm)
        pixels = np.random.default_rng(0).integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
        self.image = Image.fromarray(pixels)

    def follow(self, version: int) -> None:
        bring(self.control, self.trainer.store, version, CommitOptions())

    def tokens(self) -> list[int]:
        from vllm import SamplingParams

        options = SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False
        )
        asked = {"prompt_token_ids": PROMPT, "multi_modal_data": {"image": self.image}}
        [output] = self.llm.generate([asked], options, use_tqdm=False)
        self.cached = output.num_cached_tokens
        return list(output.outputs[0].token_ids)

    def tokens_of_transformers(self) -> list[int]:
        """What transformers makes of the trainer's checkpoint, the same image and the same prompt."""
        import torch
        import transformers

        path = self.trainer.path
        model = transformers.PaliGemmaForConditionalGeneration.from_pretrained(path)
        images = transformers.AutoProcessor.from_pretrained(path).image_processor
        pixels = images(self.image, return_tensors="pt")["pixel_values"]
        ids = [*[IMAGE_TOKEN] * images.image_seq_length, model.config.text_config.bos_token_id]
        ids += [*PROMPT, NEWLINE]
        found: list[int] = []
        with torch.inference_mode():
            for _ in range(TOKENS):
                tokens = torch.tensor([ids + found])
                # All ones: each token sees those before it alone, as with vLLM on a CPU.
                answer = model(tokens, pixel_values=pixels, token_type_ids=torch.ones_like(tokens))
                found.append(int(answer.logits[0, -1].argmax()))
        return found

    def kept(self) -> int:
        """How many images the encoder's cache holds."""
        core = self.llm.llm_engine.engine_core.engine_core
        return len(core.model_executor.driver_worker.worker.model_runner.encoder_cache)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    from vllm.model_executor.models.siglip import SiglipEncoderInfo

    directory = tmp_path_factory.mktemp("model")
    write_vision_checkpoint(directory / "base")
    # vLLM's own function imports torchvision, of which there is none for this torch, to tell SigLIP from others.
    by_way_of = "vllm.model_executor.models.paligemma.get_vision_encoder_info"
    with (
        mock.patch(by_way_of, SiglipEncoderInfo),
        engine(directory / "base", limit_mm_per_prompt={"image": 1}) as llm,
    ):
        yield Seeing(llm, Trainer(directory / "base", directory))


def test_the_parts_that_see_follow_random_deltas(seeing: Seeing) -> None:
    seeing.follow(seeing.trainer.version)
    for _ in range(5):
        seeing.follow(seeing.trainer.step())
        [found] = seeing.llm.collective_rpc("tested_state", args=(str(seeing.trainer.path),))
        assert found["differences"] == []
        kept, read = found["shares"]
        assert kept == read
        assert seeing.tokens() == seeing.tokens_of_transformers()
    [found] = seeing.llm.collective_rpc("tested_placement")
    assert found["unmapped"] == {}


def test_an_image_that_was_cached_is_seen_with_the_new_weights(seeing: Seeing) -> None:
    seeing.follow(seeing.trainer.step())
    before = [seeing.tokens(), seeing.tokens()]
    assert before[0] == before[1]
    assert seeing.cached > 0
    assert seeing.kept() == 1
    seeing.follow(seeing.trainer.step(0.5, only="vision_tower."))
    after = seeing.tokens()
    assert after == seeing.tokens_of_transformers()
    assert after != before[0]


@pytest.mark.parametrize("cache", ["prefix", "encoder"])
def test_either_cache_alone_would_give_the_old_image(seeing: Seeing, cache: str) -> None:
    """Neither reset is there for nothing."""
    seeing.follow(seeing.trainer.step())
    before = seeing.tokens()
    owner = seeing.llm if cache == "prefix" else seeing.llm.llm_engine
    with mock.patch.object(owner, f"reset_{cache}_cache", return_value=True):
        seeing.follow(seeing.trainer.step(0.5, only="vision_tower."))
        assert seeing.tokens() != seeing.tokens_of_transformers()
    seeing.control.reset_caches(60.0)
    assert seeing.kept() == 0
    after = seeing.tokens()
    assert after == seeing.tokens_of_transformers()
    assert after != before
