"""`syncline explain`: the decision, every other way, the reasons; as a table and as JSON."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import numpy as np
import pytest

import syncline
from syncline.cli import main


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["explain", "--json", *arguments])
    return json.loads(capsys.readouterr().out)


def test_it_prints_the_choice_the_alternatives_and_why(capsys) -> None:
    main(["explain", "--engines", "2", "--fabric", "--density", "0.01", "--model-gb", "2"])
    out = capsys.readouterr().out
    assert "* collective" in out
    assert "2 GB of weights, 1.000% changed" in out
    assert "one broadcast of the changes" in out
    assert "no colocated, full: shared-memory: not all engines are on the trainer's machine" in out


def test_json_has_every_row_and_the_terms_of_each_prediction(capsys) -> None:
    found = explained(capsys, "--colocated", "--store-mb-s", "100", "--pause-s", "0.5")
    assert found["transport"] == "shared-memory"
    assert len(found["alternatives"]) == 7
    assert found["chosen"]["terms"]["pause_s"] == 0.5
    assert found["links"]["store"]["up_bytes_per_s"] == 100e6
    refused = [row for row in found["alternatives"] if row["terms"] is None]
    assert any("nothing is saved" in row["why"] for row in refused)


def test_density_and_speed_are_measured_in_the_store(tmp_path, capsys) -> None:
    weights = {"w": np.ones(10_000, np.float32)}
    publisher = syncline.Publisher(syncline.open_store(tmp_path / "run"))
    publisher.publish(weights)
    weights["w"][:300] += 1
    publisher.publish(weights)
    found = explained(capsys, str(tmp_path / "run"))
    assert found["density"]["share"] == 0.03
    assert "measured" in found["links"]["store"]["origin"]
    assert found["topology"]["engines"] == 1


def test_density_of_a_pair_of_checkpoints(tmp_path, capsys) -> None:
    from safetensors.numpy import save_file

    old = np.zeros(1000, np.float16)
    new = old.copy()
    new[:50] = 1
    save_file({"w": old}, tmp_path / "old.safetensors")
    save_file({"w": new}, tmp_path / "new.safetensors")
    pair = (str(tmp_path / "old.safetensors"), str(tmp_path / "new.safetensors"))
    found = explained(capsys, "--pair", *pair)["density"]
    assert (found["share"], found["dtype"], found["model_bytes"]) == (0.05, "F16", 2000)


def test_nothing_left_is_status_1_and_says_why_row_by_row(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "--no-store"])
    assert stopped.value.code == 1
    assert "apart, full: there is no store" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(
            ["explain", "--colocated", "--transport", "shared-memory", "--kind", "delta", "--json"]
        )
    assert stopped.value.code == 1
    assert "nothing is saved" in json.loads(capsys.readouterr().out)["message"]


def test_wrong_usage_is_status_2(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "--engines", "0"])
    assert stopped.value.code == 2


def test_a_fabric_is_measured_between_two_processes_that_talk(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    answering = threading.Thread(target=main, args=(["explain", "--answer", address],))
    answering.start()
    main(["explain", "--fabric", "--json", "--probe", address])
    answering.join()
    lines = capsys.readouterr().out.splitlines()
    found = next(json.loads(line) for line in lines if line.startswith("{"))
    assert "between the two sides" in found["links"]["fabric"]["origin"]
