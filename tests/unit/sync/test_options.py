"""Options of a publisher that do not exist are named, with the one that was meant."""

from __future__ import annotations

import pytest

import syncline
from syncline.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"encodng": 1}, "no option 'encodng'; did you mean 'encoding'\\?"),
        ({"anchors_every": 3}, "no option 'anchors_every'; did you mean 'anchor_every'\\?"),
        ({"zzz": 1}, "no option 'zzz'; it has encoding, "),
    ],
)
def test_a_misspelt_option_names_the_nearest_one(options, words):
    with pytest.raises(ConfigError, match=words):
        syncline.Publisher(syncline.MemoryStore(), **options)
