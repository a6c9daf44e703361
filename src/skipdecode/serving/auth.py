"""API keys: known by their SHA-256 only, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from pathlib import Path

from skipdecode.errors import UsageError

__all__ = ["ENVIRONMENT_VARIABLE", "KeyRing"]

ENVIRONMENT_VARIABLE = "SKIPDECODE_API_KEY"


class KeyRing:
    """The keys that are accepted; with none, everybody is.

    Parameters
    ----------
    hashes : iterable of str
        SHA-256 of the keys, as 64 hexadecimal digits.
    """

    def __init__(self, hashes: tuple[str, ...] = ()) -> None:
        self._hashes = tuple(value.lower().encode() for value in hashes)

    @classmethod
    def read(cls, path: str | None) -> KeyRing:
        """Keys from a file of hashes, one a line (# begins a comment), and from the environment, in plain, with commas.

        Raises
        ------
        UsageError
            The file cannot be read, or a line is no hash.
        """
        hashes = []
        if path is not None:
            try:
                lines = Path(path).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as e:
                raise UsageError(f"cannot read the API keys in {path}: {e}") from None
            for number, line in enumerate(lines, 1):
                # sha256sum writes a dash, for standard input, behind the hash.
                value = line.partition("#")[0].strip().removesuffix("-").rstrip()
                if value and not re.fullmatch(r"[0-9a-fA-F]{64}", value):
                    raise UsageError(
                        f"{path}, line {number}: not the SHA-256 of a key; make one with: printf %s KEY | sha256sum"
                    )
                hashes += [value] if value else []
            if not hashes:
                raise UsageError(f"{path} holds no key: leave --api-keys out to need none")
        keys = os.environ.get(ENVIRONMENT_VARIABLE, "").split(",")
        hashes += [_hash(key.strip().encode()) for key in keys if key.strip()]
        return cls(tuple(hashes))

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def accepts(self, authorization: bytes) -> bool:
        """Whether an Authorization header's value holds one of the keys."""
        scheme, _, key = authorization.partition(b" ")
        given = _hash(key.strip()).encode()
        # All are compared, so that the time tells nothing.
        found = [hmac.compare_digest(given, value) for value in self._hashes]
        return scheme.lower() == b"bearer" and any(found)


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
