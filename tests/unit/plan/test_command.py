"""`syncline plan`, as a person and as a program see it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import syncline
from syncline import kernels
from syncline.cli import group, main

CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "vocab_size": 128,
    "num_nextn_predict_layers": 1,
}
SIZES = ["--trainer", "tp=2,pp=2,ep=4,etp=1", "--engine", "tp=4,ep=4,replicas=3"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_a_plan_is_shown(config: str) -> None:
    result = CliRunner().invoke(group, ["plan", "--model", config, *SIZES])
    assert result.exit_code == 0, result.output
    assert "tightest rank" in result.output
    assert "tensors of the trainer go to no engine, first model.layers.4." in result.output
    assert "@" in result.output


def test_stages_may_have_any_number_of_layers(config: str) -> None:
    uneven = ["--trainer", "tp=2,pp=3,ep=2,etp=1", "--stages", "1,1,2", *SIZES[2:]]
    result = CliRunner().invoke(group, ["plan", "--model", config, *uneven, "--records"])
    found = {entry["name"]: entry for entry in map(json.loads, result.output.splitlines())}
    for layer, stage in enumerate((0, 1, 2, 2)):
        name = f"model.layers.{layer}.input_layernorm.weight"
        assert {place["rank"] // 2 for place in found[name]["sources"]} == {stage}


def test_the_picture_says_what_its_shades_mean(config: str) -> None:
    lines = CliRunner().invoke(group, ["plan", "--model", config, *SIZES]).output.splitlines()
    assert lines[-1].startswith("blank: nothing; . to @: up to ")
    assert "1 x 1 rank(s)" in lines[-1]
    assert not any("e+0" in line for line in lines)


def test_a_plan_is_json(config: str) -> None:
    result = CliRunner().invoke(group, ["plan", "--model", config, *SIZES, "--json"])
    found = json.loads(result.output)
    assert len(found["links_bytes"]) == 8
    assert {len(row) for row in found["links_bytes"]} == {12}
    assert sum(map(sum, found["links_bytes"])) == found["moved_bytes"]
    assert all(".4." in name for name in found["unused"])


def test_a_tensor_has_a_record(config: str) -> None:
    name = "model.layers.3.mlp.experts.5.up_proj.weight"
    result = CliRunner().invoke(group, ["plan", "--model", config, *SIZES, "--tensor", name])
    found = json.loads(result.output)
    assert [place["rank"] for place in found["sources"]] == [6]
    assert [place["rank"] for place in found["targets"]] == [2]
    lines = CliRunner().invoke(group, ["plan", "--model", config, *SIZES, "--records"]).output
    assert found in [json.loads(line) for line in lines.splitlines()]


def test_a_record_says_where_and_as_what_its_tensor_lies(config: str) -> None:
    name = "model.layers.3.mlp.experts.5.up_proj.weight"
    result = CliRunner().invoke(group, ["plan", "--model", config, *SIZES, "--tensor", name])
    found = json.loads(result.output)
    (held,), (wanted,) = found["sources"], found["targets"]
    assert {key: held[key] for key in ("pp", "tp", "ep", "etp")} == {
        "pp": 1,
        "tp": 0,
        "ep": 2,
        "etp": 0,
    }
    assert held["experts"] == wanted["experts"] == [5]
    assert (held["dtype"], held["replicas"], held["cuts"]) == ("BF16", [6], [])
    assert found["engines"] == 3
    assert found["version"] is found["fingerprint"] is None
    latent = "model.layers.3.self_attn.o_proj.weight"
    result = CliRunner().invoke(group, ["plan", "--model", config, *SIZES, "--tensor", latent])
    halves = [place["cuts"] for place in json.loads(result.output)["sources"]]
    assert [{"axis": 1, "start": 16, "count": 16, "of": 32}] in halves


def test_a_record_takes_version_and_fingerprint_from_a_store(config: str, tmp_path: Path) -> None:
    name = "model.norm.weight"
    published = syncline.Publisher(syncline.FilesystemStore(tmp_path / "run"))
    published.publish({name: np.ones(32, np.float32)})
    given = ["--tensor", name, "--store", str(tmp_path / "run")]
    found = json.loads(CliRunner().invoke(group, ["plan", "--model", config, *given]).output)
    marks = kernels.fingerprint(np.ones(32, np.float32).view(np.uint32), 0, kernels.seeds(name))
    assert (found["version"], found["fingerprint"]) == (1, marks.hex())


def test_names_are_those_of_the_engine(config: str) -> None:
    name = "model.layers.3.mlp.experts.5.up_proj.weight"
    for engine, local in (("vllm", "experts.routed_experts.w13_weight"), ("sglang", "w13_weight")):
        arguments = ["--names", engine, "--tensor", name]
        result = CliRunner().invoke(group, ["plan", "--model", config, *SIZES, *arguments])
        (place,) = json.loads(result.output)["targets"]
        assert place["local"].endswith(local)
        assert ("routed" in place["local"]) == (engine == "vllm")


def test_what_is_not_planned_is_warned_of(config: str) -> None:
    path = Path(config)
    path.write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "fp8"}}))
    result = CliRunner().invoke(group, ["plan", "--model", config, *SIZES])
    assert "warning: the engine's quantised tensors are not planned" in result.output
    as_json = CliRunner().invoke(group, ["plan", "--model", config, *SIZES, "--json"])
    found = json.loads(as_json.output)
    assert len(found["warnings"]) == 2
    assert found["tightest"]["bytes"] == max(found["peak_bytes"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer", "tp=3"], "cannot be cut into 3 equal parts"),
        (["--trainer", "pp=3"], "4 layers"),
        (["--trainer", "pp=3"], "3 stages of 1 chunk(s); say how many"),
        (["--trainer", "pp=2,first=3,vpp=2"], ", stage 0 having 3; say how many"),
        (["--trainer", "pp=2", "--stages", "3,2"], "found 5 layers"),
        (["--trainer", "pp=3", "--stages", "2,2"], "in 3 stages"),
        (["--trainer", "pp=2", "--stages", "2,1+1"], "as many chunks"),
        (["--trainer", "pp=2", "--stages", "two,2"], "--stages: expected layers"),
        (["--trainer", "depth=3"], "'depth=3' is not NAME=NUMBER"),
        (["--engine", "tp=4,ep=2"], "ep is 1 or tp"),
        (["--tensor", "model.nothing"], "in neither layout"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    config: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "--model", config, *arguments])
    error = capsys.readouterr().err
    assert exit_.value.code == 1
    assert message in error
    assert error.count("\n") == 1
