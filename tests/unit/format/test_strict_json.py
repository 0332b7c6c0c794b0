from __future__ import annotations

import pytest

from syncline.errors import FormatError
from syncline.format import strict_json


def parse(text: str | bytes) -> object:
    data = text.encode() if isinstance(text, str) else text
    return strict_json.parse(data, "x.json", limit_bytes=1 << 20)


def fields(value: object, path: str = "") -> strict_json.Fields:
    return strict_json.Fields(value, "x.json", ("a", "b"), path)


def test_what_is_dumped_parses_back() -> None:
    document = {"b": [1, "é\n", None, True], "a": {"deep": [{}]}, "": -1}
    data = strict_json.dump(document)
    assert data == '{"":-1,"a":{"deep":[{}]},"b":[1,"é\\n",null,true]}\n'.encode()
    assert parse(data) == document


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", r"not JSON at character 0"),
        ("{", r"not JSON at character 1"),
        ("{} {}", r"not JSON at character 3"),
        ('{"a":1,}', r"not JSON at character 7"),
        ("{'a':1}", r"not JSON at character 1"),
        (b"\xef\xbb\xbf{}", r"not JSON at character 0"),
        ("{}".encode("utf-16"), r"not UTF-8 at byte 0"),
        (b'"\xff"', r"not UTF-8 at byte 1"),
        ('{"a":1,"b":2,"a":1}', r"key 'a' is there twice"),
        ('{"x":{"a":1,"a":1}}', r"key 'a' is there twice"),
        ("NaN", r"finite, found NaN"),
        ("[Infinity]", r"finite, found Infinity"),
        ('{"a":-Infinity}', r"finite, found -Infinity"),
        ("[" * 100_000, r"nested too deeply"),
        ("1" * 5000, r"limit"),
        (" " * (1 << 20) + "1", r"at most 1048576 bytes are allowed, found 1048577"),
    ],
)
def test_anything_but_strict_json_is_refused(text: str | bytes, fault: str) -> None:
    with pytest.raises(FormatError, match=rf"^x.json: .*{fault}"):
        parse(text)


def test_many_keys_are_no_burden() -> None:
    keys = ",".join(f'"{index}":0' for index in range(50_000))
    with pytest.raises(FormatError, match=r"key '49999' is there twice"):
        parse("{" + keys + ',"49999":0}')


@pytest.mark.parametrize("document", [{1, 2}, float("nan"), {"a": b""}, "\ud800"])
def test_what_json_cannot_say_is_not_dumped(document: object) -> None:
    with pytest.raises(FormatError, match=r"cannot be written as JSON"):
        strict_json.dump(document)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ([], r"^x\.json must be an object, found \[\]"),
        (None, r"^x\.json must be an object, found None"),
        ({"a": 1}, r"^x\.json: b is missing"),
        ({"a": 1, "b": 2, "c": 3}, r"^x\.json: c is not a known key; known are \['a', 'b'\]"),
    ],
)
def test_objects_have_exactly_their_keys(value: object, fault: str) -> None:
    with pytest.raises(FormatError, match=fault):
        fields(value)


def test_messages_name_the_path() -> None:
    with pytest.raises(FormatError, match=r"^x\.json: rows\[3\] must be an object"):
        fields(7, "rows[3]")
    with pytest.raises(FormatError, match=r"^x\.json: rows\[3\]\.b is missing"):
        fields({"a": 0}, "rows[3]")
    with pytest.raises(FormatError, match=r"^x\.json: rows\[3\]\.a must be a string, found 0"):
        fields({"a": 0, "b": 0}, "rows[3]").text("a")
    with pytest.raises(FormatError, match=r"^x\.json: a must be a string, found 0"):
        fields({"a": 0, "b": 0}).text("a")


@pytest.mark.parametrize("value", [True, 1.0, "1", None, [], -1, 1 << 63, 10**4000])
def test_only_plain_integers_in_range_are_integers(value: object) -> None:
    with pytest.raises(
        FormatError, match=r"^x\.json: a must be an integer from 0 to 9223372036854775807"
    ):
        fields({"a": value, "b": 0}).integer("a")


def test_members_of_the_right_kind_come_through() -> None:
    found = fields({"a": (1 << 63) - 1, "b": "0af"})
    assert found.integer("a") == (1 << 63) - 1
    assert found.hexadecimal("b", 3) == found.word("b", "x", "0af") == found.text("b") == "0af"
    assert fields({"a": [1], "b": None}).items("a") == [1]


@pytest.mark.parametrize("value", ["0AF", "0a", "0afg", "0a\n", "", 10])
def test_hexadecimal_digits_are_lowercase_and_counted(value: object) -> None:
    with pytest.raises(FormatError, match=r"a must be (3 lowercase hexadecimal digits|a string)"):
        fields({"a": value, "b": 0}).hexadecimal("a", 3)


def test_words_and_lists_are_checked() -> None:
    found = fields({"a": "x", "b": {}})
    with pytest.raises(FormatError, match=r"a must be 'y' or 'z', found 'x'"):
        found.word("a", "y", "z")
    with pytest.raises(FormatError, match=r"b must be a list, found {}"):
        found.items("b")


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(FormatError) as caught:
        fields({"a": "x" * 10_000, "b": 0}).integer("a")
    assert len(str(caught.value)) < 250


def document(text: str) -> strict_json.Fields:
    keys = ("format", "format_version")
    return strict_json.document(text.encode(), "x.json", "syncline-x", keys, limit_bytes=99)


def test_documents_say_their_format() -> None:
    assert document('{"format":"syncline-x","format_version":1}')["format_version"] == 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            '{"format":"syncline-y","format_version":1}',
            "format must be 'syncline-x', found 'syncline-y'",
        ),
        (
            '{"format":"syncline-x","format_version":2,"new":0}',
            "format_version must be 1, found 2: .*upgrade",
        ),
        (
            '{"format":"syncline-x","format_version":0}',
            "format_version must be an integer from 1 to 1",
        ),
        ('{"format":"syncline-x","format_version":true}', "format_version must be an integer"),
        ('{"format":"syncline-x"}', "format_version is missing"),
        ("[]", "must be an object"),
    ],
)
def test_documents_of_another_format_are_refused(text: str, fault: str) -> None:
    with pytest.raises(FormatError, match=fault):
        document(text)
