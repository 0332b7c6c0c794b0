from __future__ import annotations

from pathlib import Path

import pytest

from syncline.demo.arithmetic import Problem
from syncline.demo.models import load_model, load_tokenizer
from syncline.demo.trainer import Experience, Trainer, compute_dtype, group_advantages

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def trainer(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Trainer:
    return Trainer(tiny_checkpoint, learning_rate=1e-4, pad=0, dtype=request.param)


@pytest.fixture
def experience(tiny_checkpoint: Path) -> Experience:
    tokenizer = load_tokenizer(tiny_checkpoint)
    prompts = [tokenizer.encode(text) for text in (Problem(3, 4).prompt, "9+9=")]
    right, wrong = tokenizer.encode("7\n"), tokenizer.encode("+1+1=")
    return Experience(prompts, [[right, wrong], [wrong, right]], [[1.0, 0.0], [0.0, 1.0]])


def log_probability(trainer: Trainer, prompt: list[int], completion: list[int]) -> float:
    model = trainer._model
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].float()
    taken = torch.tensor(completion)[:, None]
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, taken).sum().item()


def test_the_weights_start_as_the_checkpoint_and_are_bf16(
    trainer: Trainer, tiny_checkpoint: Path
) -> None:
    base = dict(load_model(tiny_checkpoint, torch.bfloat16).named_parameters())
    weights = dict(trainer.weights())
    assert weights.keys() == base.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.int16), base[name].view(torch.int16))


def test_a_step_makes_what_was_rewarded_likelier(trainer: Trainer, experience: Experience) -> None:
    prompt, (right, wrong) = experience.prompts[0], experience.completions[0]
    before = [log_probability(trainer, prompt, one) for one in (right, wrong)]
    trainer.step(experience)
    after = [log_probability(trainer, prompt, one) for one in (right, wrong)]
    assert after[0] > before[0]
    assert after[0] - after[1] > before[0] - before[1]


def test_the_working_copy_is_the_master_rounded_and_the_master_keeps_what_rounding_drops(
    trainer: Trainer, experience: Experience
) -> None:
    trainer.step(experience)
    lost = 0
    for master, weight in zip(trainer._master, trainer._working, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(weight.float(), master.to(torch.bfloat16).float())
        lost += int((master != weight.float()).sum())
    assert lost > 0


def test_spread_masters_lie_anywhere_in_the_cells_of_the_weights(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer._master[0].view(-1)[:2] = torch.tensor([0.0, -0.0])
        trainer._working[0].view(-1)[:2] = torch.tensor([0.0, -0.0])
    before = [master.clone() for master in trainer._master]
    trainer.spread_masters(3)
    for old, master, weight in zip(before, trainer._master, trainer._working, strict=True):
        rounded = master.to(torch.bfloat16)
        assert torch.equal(rounded.view(torch.int16), weight.to(torch.bfloat16).view(torch.int16))
        offsets = (master.view(torch.int32) - old.view(torch.int32)).abs().double()
        assert offsets.mean() > 0.4 * 0x7FFF
        assert offsets.unique().numel() > 10


def test_equal_rewards_leave_the_weights_alone(trainer: Trainer, experience: Experience) -> None:
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    trainer.step(Experience(experience.prompts, experience.completions, [[1.0, 1.0], [0.0, 0.0]]))
    for name, tensor in trainer.weights():
        assert torch.equal(tensor.view(torch.int16), before[name].view(torch.int16)), name


def test_filling_up_rows_changes_no_loss(tiny_checkpoint: Path, experience: Experience) -> None:
    """The loss of a filled batch is the mean over tokens of what its rows have alone."""
    trainer = Trainer(tiny_checkpoint, learning_rate=1e-3, pad=0, dtype=torch.float32)
    expected, tokens = 0.0, 0
    advantages = group_advantages(torch.tensor(experience.rewards))
    for place, prompt in enumerate(experience.prompts):
        for sample, completion in enumerate(experience.completions[place]):
            gain = log_probability(trainer, prompt, completion)
            expected -= advantages[place, sample].item() * gain
            tokens += len(completion)
    assert trainer._loss(experience).item() == pytest.approx(expected / tokens, rel=1e-4)


def test_advantages_are_centred_and_scaled_by_row() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    advantages = group_advantages(rewards)
    assert advantages[0].tolist() == pytest.approx([1.4997, -0.4999, -0.4999, -0.4999], abs=1e-4)
    assert advantages[1].tolist() == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("flags : fpu avx2 avx512_bf16 sse", torch.bfloat16),
        ("flags : amx_bf16 amx_tile", torch.bfloat16),
        ("flags : fpu avx2 avx512f", torch.float32),
    ],
)
def test_bf16_is_computed_with_where_the_processor_does_it_in_hardware(
    flags: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert compute_dtype(tmp_path / "cpuinfo") == dtype
    assert compute_dtype(tmp_path / "nothing") == torch.float32
