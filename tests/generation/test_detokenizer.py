"""Text of tokens one by one: whole characters, stop strings over token boundaries, nothing lost."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from checkpoints import byte_tokenizer
from skipdecode.data.stopping import StopStrings
from skipdecode.engine import StepOutput
from skipdecode.generation.detokenizer import Detokenizer, TokenTexts

TOKENIZER = byte_tokenizer()
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["a", "b", "n", "t", "s", "'", ".", ",", "?", "'s", "n't", " ", "do", "é", "\u200d", "👩", "\ufffd"]


def tokenizer_of(model, decoder, *, clean_up=False):
    backend = Tokenizer(model)
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<tool call>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=clean_up
    )


def numbered(words):
    return {word: i for i, word in enumerate(dict.fromkeys([*SPECIAL, *words]))}


def byte_level():
    merged = [word for word in TOKENIZER.backend_tokenizer.get_vocab() if len(word) == 1]
    pairs = [f"{first}{second}" for first in merged[::40] for second in merged[::30]]
    return tokenizer_of(models.BPE(vocab=numbered([*merged, *pairs]), merges=[]), decoders.ByteLevel())


def metaspace(decoder):
    words = [*WORDS, *("▁" + word for word in WORDS), "▁", "▁▁▁"]
    vocab = numbered([*BYTES, *words])
    return tokenizer_of(models.BPE(vocab=vocab, merges=[], byte_fallback=True), decoder)


def word_pieces(decoder, *, clean_up):
    words = [*WORDS, *("##" + word for word in WORDS), "do not"]
    model = models.WordPiece(vocab=numbered(words), unk_token="<unk>")
    return tokenizer_of(model, decoder, clean_up=clean_up)


LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
KINDS = {
    "bytes": TOKENIZER,
    "byte-level": byte_level(),
    "metaspace": metaspace(decoders.Metaspace()),
    "byte-fallback": metaspace(decoders.Sequence(LLAMA)),
    "word-piece": word_pieces(decoders.WordPiece(cleanup=False), clean_up=False),
    "word-piece-cleaned": word_pieces(decoders.WordPiece(cleanup=True), clean_up=False),
    "word-piece-cleaned-twice": word_pieces(decoders.WordPiece(cleanup=True), clean_up=True),
    "words-cleaned": word_pieces(None, clean_up=True),
    "end-of-word": word_pieces(decoders.BPEDecoder(suffix="s"), clean_up=True),
}


def outputs(tokens):
    reasons = [None] * (len(tokens) - 1) + ["length"]
    return [
        StepOutput(0, i, token, -1.0, 8, reason, 0.0, 0.0)
        for i, (token, reason) in enumerate(zip(tokens, reasons, strict=True))
    ]


def detokenizer(stops=(), tokenizer=TOKENIZER):
    return Detokenizer(TokenTexts(tokenizer), StopStrings(stops))


def pushed(tokens, stops=(), tokenizer=TOKENIZER):
    """What each push returns, up to the end or a stop."""
    stream = detokenizer(stops, tokenizer)
    parts = []
    for output in outputs(tokens):
        parts.append(stream.push(output))
        if stream.stopped:
            break
    return parts, stream.stopped


def text_of(parts):
    return "".join(piece.text for part in parts for piece in part)


def bytes_of(parts):
    return b"".join(piece.bytes for part in parts for piece in part if piece.bytes is not None)


def test_the_bytes_of_a_token_are_its_own():
    def found(written, kind="byte-fallback"):
        parts, _ = pushed(KINDS[kind].convert_tokens_to_ids(written), tokenizer=KINDS[kind])
        return [piece.bytes for part in parts for piece in part]

    assert found(["▁a", "▁a", "a", "<0xF0>", "</s>"]) == [b"a", b" a", b"a", b"\xf0", None]
    assert found(["do", "##s"], "word-piece") == [b"do", b"s"]
    parts, _ = pushed(TOKENIZER("😀").input_ids)
    assert [piece.bytes for part in parts for piece in part] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]


def test_a_stop_token_ends_the_text_before_it():
    tokens = TOKENIZER("hello").input_ids
    stream = Detokenizer(TokenTexts(TOKENIZER), StopStrings(("xx",)), {tokens[2]})
    pieces = [piece for output in outputs(tokens)[:3] for piece in stream.push(output)]
    assert stream.stopped
    assert [(piece.text, piece.bytes) for piece in pieces] == [("h", b"h"), ("e", b"e"), ("", None)]


def test_a_token_has_a_name():
    texts = TokenTexts(KINDS["byte-fallback"])
    names = [texts.name(i) for i in KINDS["byte-fallback"].convert_tokens_to_ids(["▁a", "a", "<0xF0>", "▁", "</s>"])]
    assert names == [" a", "a", "bytes:\\xf0", " ", "</s>"]
    assert texts.name(9999) == "token_id:9999"
    assert texts.name(texts._tokenizer.convert_tokens_to_ids("▁a"), b"a") == "a"


def test_characters_of_several_tokens_come_whole():
    parts, _ = pushed(TOKENIZER("aé€😀z").input_ids)
    assert [p.text for part in parts for p in part] == ["a", "", "é", "", "", "€", "", "", "", "😀", "z"]
    assert all(len(part) == 1 for part in parts)  # each token is reported when it comes


def one_text(kind, tokens):
    """The text of the tokens; of broken characters in single bytes, which take whole ones with them, None."""
    text = KINDS[kind].decode(tokens, skip_special_tokens=True)
    return None if kind == "byte-fallback" and "\ufffd" in text else text


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=200)
def test_text_is_that_of_all_tokens_together(kind, data):
    size = len(KINDS[kind])
    tokens = data.draw(st.lists(st.integers(0, size + 1), min_size=1, max_size=40))
    parts, _ = pushed(tokens, tokenizer=KINDS[kind])
    text = one_text(kind, tokens)
    assert text is None or text_of(parts) == text
    assert [p.output.token for part in parts for p in part] == tokens
    assert bytes_of(parts).decode("utf-8", "replace") == text_of(parts)


@pytest.mark.parametrize("behind", [[], ["<0x20>"], ["<0x41>"], ["▁a"]])
def test_a_space_in_front_of_the_text_is_stripped_as_a_byte_too(behind):
    tokenizer = KINDS["byte-fallback"]
    tokens = tokenizer.convert_tokens_to_ids(["<0x20>", *behind])
    parts, _ = pushed(tokens, tokenizer=tokenizer)
    assert text_of(parts) == tokenizer.decode(tokens)


@given(text=st.text("aé€😀👩\u200d\n \ufffd", max_size=12))
@settings(max_examples=200)
def test_characters_in_single_bytes_are_those_of_all_tokens_together(text):
    tokenizer = KINDS["byte-fallback"]
    tokens = [tokenizer.convert_tokens_to_ids("▁")]
    for character in text:
        single = tokenizer.convert_tokens_to_ids(character)
        written = [f"<0x{byte:02X}>" for byte in character.encode()]
        tokens += tokenizer.convert_tokens_to_ids(written) if single in (None, 0) or character == "é" else [single]
    parts, _ = pushed(tokens, tokenizer=tokenizer)
    assert text_of(parts) == tokenizer.decode(tokens, skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=100)
def test_a_stop_ends_the_text_where_it_begins_in_all_of_it(kind, data):
    tokens = data.draw(st.lists(st.integers(0, len(KINDS[kind]) - 1), min_size=1, max_size=30))
    whole = one_text(kind, tokens)
    if not whole:
        return
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start : start + data.draw(st.integers(1, 6))]
    parts, stopped = pushed(tokens, (stop,), KINDS[kind])
    assert stopped
    assert text_of(parts) == whole[: whole.find(stop)]
    assert bytes_of(parts).decode("utf-8", "replace").startswith(text_of(parts).rstrip("\ufffd"))


@given(text=st.text("ab", min_size=1, max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300)
def test_stop_strings_cut_and_nothing_of_them_shows(text, stops):
    tokens = TOKENIZER(text).input_ids
    stream = detokenizer(stops)
    shown = ""
    for count, output in enumerate(outputs(tokens), 1):
        shown += "".join(piece.text for piece in stream.push(output))
        ends = [text[:count].find(s) for s in stops if s in text[:count]]
        assert stream.stopped == bool(ends)
        want = text[: min(ends)] if ends else text[:count]
        # Never more than is allowed, and no more held back than the beginning of a stop.
        assert want.startswith(shown)
        if stream.stopped or count == len(tokens):
            assert shown == want == StopStrings(stops).cut(text)
            break
        held = want[len(shown) :]
        assert not held or any(s.startswith(held) for s in stops)


def test_a_stop_is_found_across_special_tokens():
    parts, stopped = pushed([*TOKENIZER("xa").input_ids, 1, 1, 1, *TOKENIZER("bc").input_ids], ("ab",))
    assert stopped
    assert text_of(parts) == "x"


def work(stops, tokens):
    """Lines of the package that run for a text, one after the other."""
    lines = 0

    def count(frame, event, _):
        nonlocal lines
        if "skipdecode" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return count

    stream, new = detokenizer(stops), outputs(tokens)
    before = sys.gettrace()
    sys.settrace(count)
    try:
        for output in new:
            stream.push(output)
    finally:
        sys.settrace(before)
    assert not stream.stopped
    return lines


@pytest.mark.parametrize("text", ["another text", "a" * 12, "\x00" * 12])
def test_the_work_for_a_token_is_small_whatever_the_stops(text):
    tokens = TOKENIZER(text).input_ids * 40
    stops = ["a" * (999 - i) + chr(65 + i) for i in range(16)]
    assert work(stops, tokens) / len(tokens) < 200  # 16,000 for a look at each length of each stop
    assert work(stops, tokens * 2) < 2.1 * work(stops, tokens)
