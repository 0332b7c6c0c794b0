"""A bearer token that no log, repr or message can show."""

from __future__ import annotations

import hmac

from syncline import config
from syncline.errors import ConfigError

_SCHEME = "bearer"


class Token:
    """A secret that is sent and compared, and never printed.

    Raises:
        ConfigError: it is empty or has characters that a header cannot carry; it is not repeated.

    Example:
        >>> Token("s3cret")
        Token(...)
        >>> Token("s3cret").is_in("Bearer s3cret"), Token("s3cret").is_in("Bearer guess")
        (True, False)
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        if not text or not all("!" <= character <= "~" for character in text):
            raise ConfigError(
                "token: expected at least one character, all of them printable ASCII without blanks"
            )
        self._text = text

    @classmethod
    def from_env(cls, variable: str) -> Token:
        """Read the token from an environment variable.

        Raises:
            ConfigError: the variable is not set, or holds no token.
        """
        text = config.secret(variable)
        try:
            return cls(text)
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from None

    def __repr__(self) -> str:
        return "Token(...)"

    def header(self) -> str:
        """Return the value of an `Authorization` header."""
        return f"Bearer {self._text}"

    def is_in(self, header: str) -> bool:
        """Tell whether an `Authorization` header carries this token. Cost: the same for every guess."""
        scheme, _, text = header.partition(" ")
        is_same = hmac.compare_digest(text.strip().encode(), self._text.encode())
        return is_same and scheme.lower() == _SCHEME
