"""Streams the text of a sequence: complete characters only, and held back if they may begin a stop string."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Collection, Iterable
from functools import cache
from typing import NamedTuple

from skipdecode.common.types import Tokenizer
from skipdecode.data.stopping import StopSearch, StopStrings, overlap
from skipdecode.engine.requests import StepOutput

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4  # bytes in UTF-8, and so the most tokens of a character
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CLEAN_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Texts from which `clean_up_tokenization` of transformers removes spaces, in its order."""


class Piece(NamedTuple):
    """A token, the text that becomes certain with it, and its own bytes; None: the text does not show the token.

    The bytes of all tokens together are the text, but for the end of a token in which a stop string begins.
    """

    output: StepOutput
    text: str
    bytes: bytes | None


class TokenTexts:
    """The texts of single tokens of a tokenizer.

    Attributes `special`: tokens that are not shown in texts, with their names. `cleans_up`: whether the tokenizer
    removes spaces from its texts. `bytes_of`: function of a token that returns its bytes, empty if it is never shown;
    None if they depend on other tokens. `inside`: the same for a token behind other text, never None.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        self.special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = b"" if backend is None or backend.decoder is None else backend.decoder.__getstate__()
        self._falls_back_to_bytes = b'"ByteFallback"' in decoder
        # The byte of each character of a token, for byte-level tokenizers.
        self._alphabet: dict[str, int] | None = None
        if type(getattr(backend, "decoder", None)).__name__ == "ByteLevel":
            self._alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
        self.cleans_up = bool(tokenizer.clean_up_tokenization_spaces) and (
            type(getattr(backend, "model", None)).__name__ != "BPE"
            or tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
        )
        self.bytes_of = cache(self._bytes_of)
        self.inside = cache(self._inside)

    def _inside(self, token: int) -> bytes:
        shown = self.bytes_of(token)
        if shown is None:
            once, twice = self.text([token]), self.text([token, token])
            shown = (twice[len(once) :] if twice.startswith(once) else once).encode()
        return shown

    def name(self, token: int, token_bytes: bytes | None = None) -> str:
        """The text of a token of these bytes (default: `inside`); a part of a character is named by its bytes.

        A token without text has its special name or its number.
        """
        shown = token_bytes or self.inside(token)
        if not shown:
            return self.special.get(token, f"token_id:{token}")
        try:
            return shown.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in shown)

    def text(self, tokens: list[int]) -> str:
        """The text of tokens, not cleaned up."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _bytes_of(self, token: int) -> bytes | None:
        written = None if token in self.special else self._tokenizer.convert_ids_to_tokens(token)
        if written is None:
            return b""
        if self._alphabet is None:
            byte = _BYTE_TOKEN.fullmatch(written) if self._falls_back_to_bytes else None
            return None if byte is None else bytes([int(byte[1], 16)])
        if any(character not in self._alphabet for character in written):
            return str(written).encode()
        return bytes(map(self._alphabet.__getitem__, written))


class Detokenizer:
    """Turns a sequence's tokens into the text of all of them, up to the first stop string.

    The text is what the tokenizer's `decode` gives for all tokens, with one exception: in byte-fallback tokenizers, an
    invalid byte makes `decode` drop the complete characters beside it too; here they stay.

    `stops`: the text ends before the first of them, or before a special token with the name of one of them.
    `stop_tokens`: the text ends before any of these tokens, special or not.

    Attribute `stopped`: whether a stop string was found; no token may follow.
    """

    def __init__(self, texts: TokenTexts, stops: StopStrings, stop_tokens: Collection[int] = ()) -> None:
        self._texts = texts
        self._decoder = _Decoder(texts)
        self._stop_tokens = {*stop_tokens, *(token for token, name in texts.special.items() if name in stops)}
        self._search = StopSearch(stops)
        self._pending: deque[Piece] = deque()
        self._known = self._shown = 0  # characters decoded, and characters released
        self.stopped = False

    def echo(self, outputs: Iterable[StepOutput]) -> list[Piece]:
        """The tokens of the prompt, before all others: the text goes on from theirs, and no stop string is sought."""
        return [Piece(output, *self._decoder.push(output.token)) for output in outputs]

    def push(self, output: StepOutput) -> list[Piece]:
        """Take the next token; returns the tokens whose text is certain now. The last token releases all."""
        stops = output.token in self._stop_tokens
        last = stops or output.finish_reason is not None
        text, shown = ("", None) if stops else self._decoder.push(output.token)
        if last:
            rest, rest_bytes = self._decoder.rest()
            text, shown = text + rest, (shown or b"") + rest_bytes if rest_bytes else shown
        self._pending.append(Piece(output, text, shown))
        self._known += len(text)
        end = self._search.push(text) if text else None
        self.stopped = stops or end is not None
        if end is not None:
            return self._cut(end - self._shown)
        return self._release(0 if last else len(self._search.held))

    def _release(self, held: int) -> list[Piece]:
        pieces = []
        while self._pending and self._shown + len(self._pending[0].text) <= self._known - held:
            pieces.append(self._pending.popleft())
            self._shown += len(pieces[-1].text)
        return pieces

    def _cut(self, length: int) -> list[Piece]:
        pieces = []
        for output, text, shown in self._pending:
            pieces.append(Piece(output, text[:length], shown if length else None))
            length -= len(pieces[-1].text)
        return pieces


class _Decoder:
    """Decodes tokens one by one.

    A token without fixed bytes is decoded after the token before it, on which its leading space may depend.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._context = 0  # tokens of the window whose text was returned
        self._stages = [_Replacer(old, old.strip(" ")) for old in _CLEAN_UP] if texts.cleans_up else []

    def push(self, token: int) -> tuple[str, bytes | None]:
        """The text that becomes certain with this token, and the token's own bytes; None if it is never shown."""
        raw = self._texts.bytes_of(token)
        if raw == b"":
            return "", None
        # Byte-fallback decoders strip a space in front of the text, also one that is written as a byte.
        if raw is None or (not self._window and raw.isascii()):
            new = self._windowed(token)
            return self._cleaned(self._utf8.decode(b"", final=True) + new, new.encode())
        new = self._new()
        self._window, self._context = [token], 1
        return self._cleaned(new + self._utf8.decode(raw), new.encode() + raw)

    def rest(self) -> tuple[str, bytes]:
        """The text that is held back, and the bytes of it that no token has had."""
        new = self._new()
        return self._cleaned(self._utf8.decode(b"", final=True) + new, new.encode(), last=True)

    def _windowed(self, token: int) -> str:
        self._window.append(token)
        text, tokens = self._new(), self._window[self._context :]
        if text.endswith(_UNFINISHED) and len(tokens) < _LONGEST_CHARACTER:
            return ""  # more bytes of the character may follow
        self._window, self._context = tokens, len(tokens)
        return text

    def _new(self) -> str:
        if len(self._window) == self._context:
            return ""
        before = self._texts.text(self._window[: self._context])
        return self._texts.text(self._window)[len(before) :]

    def _cleaned(self, text: str, new: bytes, *, last: bool = False) -> tuple[str, bytes]:
        for stage in self._stages:
            text = stage.push(text, last=last)
        return text, text.encode() if self._stages else new


class _Replacer:
    """`str.replace` for a text that comes in parts."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self._held = ""

    def push(self, part: str, *, last: bool) -> str:
        *done, rest = (self._held + part).split(self._old)
        held = 0 if last else overlap(rest, self._old)
        self._held = rest[len(rest) - held :]
        return self._new.join([*done, rest[: len(rest) - held]])
