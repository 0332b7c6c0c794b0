"""One vLLM server of two workers for all tests of a session, and a trainer that it follows."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from pathlib import Path

import pytest

import engine_leftovers
from syncline.vllm.commit import CommitOptions, bring
from syncline.vllm.control import HttpControl
from vllm_serving import Served, Trainer, write_model


def pytest_collection_modifyitems(items):
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:  # this directory is called vllm, too
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip("no vLLM here: make test-vllm"))


@pytest.fixture(scope="session", autouse=True)
def no_leftovers(tmp_path_factory):
    tmp_path_factory.getbasetemp()  # kept for who looks into a failure, so made outside
    with engine_leftovers.removed():
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "qwen3"
    write_model(path)
    return path


@pytest.fixture(scope="session")
def server(model, tmp_path_factory):
    served = Served(
        model,
        tmp_path_factory.mktemp("server"),
        workers=2,
        more=("--worker-extension-cls", "vllm_faulty_worker.FaultyWorker"),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(served.stop)
        served.start()
        yield served


@pytest.fixture
def slow_steps(server):
    """Some milliseconds for every token, on however fast a machine."""
    server.rpc("faulty_slow", "3")
    yield
    server.rpc("faulty_slow", "0")


@pytest.fixture(scope="session")
def trainer(model, tmp_path_factory):
    return Trainer(model, tmp_path_factory.mktemp("trainer") / "run")


@pytest.fixture
def control(server):
    return HttpControl(server.url)


@pytest.fixture
def publish(trainer):
    """Publish a version that is new, and return its number."""
    return lambda: trainer.step(1000 + max(trainer.versions))


@pytest.fixture
def follow(server, trainer, control, publish):
    """Bring the server to a version, by default one that is new.

    What runs `when_staged` meets the pause right afterwards, however fast the machine generates.
    """

    def bring_to(version=None, store=None, *, repair=False, when_staged=lambda: None, **options):
        number = publish() if version is None else version
        url = str(trainer.store if store is None else store)

        def reached(step):
            if step == "staged":
                when_staged()

        return bring(control, url, number, CommitOptions(**options), repair=repair, reached=reached)

    return bring_to
