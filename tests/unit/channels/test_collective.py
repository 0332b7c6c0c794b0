"""The engine's end of a collective path, before any group is made."""

from __future__ import annotations

import pytest

from syncline.channels import CollectiveInlet, groups
from syncline.channels.lobby import Lobby
from syncline.errors import TransportUnavailableError


def test_an_engine_without_torch_says_so_where_it_joins(monkeypatch) -> None:
    """In a round it would keep all others from committing."""
    lobby = Lobby("127.0.0.1:0", CollectiveInlet.name, 5.0)
    monkeypatch.setattr(groups, "find_spec", lambda name: None)
    inlet = CollectiveInlet(lobby.address, name="a", timeout_s=5.0)
    try:
        with pytest.raises(TransportUnavailableError, match="pip install"):
            inlet.channel()
        assert lobby.members() == {}
    finally:
        inlet.close()
        lobby.close()
