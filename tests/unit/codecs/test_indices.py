from __future__ import annotations

import numpy as np
import pytest

from contracts.codecs import apply, encode
from syncline import codecs
from syncline.errors import CodecError
from syncline.types import TensorMeta

INDICES = codecs.get("indices")
META = TensorMeta("w", "BF16", (10,))
OLD = np.arange(10, dtype=np.uint16)


def test_units_are_stored_as_they_are() -> None:
    new = OLD.copy()
    new[[2, 7]] = [0x1234, 0xABCD]
    payload = encode(INDICES, META, OLD, new, 5)
    assert payload.hex(" ") == "00 02 05 0a 01 02 00 00 00 34 12 01 02 00 00 00 cd ab"
    nothing = np.empty(0, np.uint16)
    places = [place.start for place in INDICES.decode(META, payload, nothing)]
    assert places == [0, 5]
    assert (apply(OLD, INDICES.decode(META, payload, OLD)) == new).all()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("01 02 0a 0a 00", "byte 0: flag"),
        ("00 02 0a 0a 0b", "byte 4: change count must be a number from 0 to 10"),
        ("00 02 0a 0a 02 01 00 00 00 01 00 00", "byte 5: offsets needs 8 bytes, found 7"),
        ("00 02 0a 0a 01 01 00 00 00 01", "byte 9: units needs 2 bytes, found 1"),
        ("00 02 0a 0a 01 0a 00 00 00 01 00", "byte 5: offset 0 of the changes is 10"),
        (
            "00 02 0a 0a 02 03 00 00 00 03 00 00 00 01 00 01 00",
            "byte 5: offset 1 of the changes is 3, which is not above",
        ),
        ("00 02 0a 0a 00 00", "byte 5: the payload must end here"),
    ],
)
def test_payloads_that_lie_are_refused(payload: str, message: str) -> None:
    with pytest.raises(CodecError) as caught:
        list(INDICES.decode(META, bytes.fromhex(payload), OLD))
    assert message in str(caught.value)
    assert caught.value.tensor == "w"
