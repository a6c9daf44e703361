"""Text of tokens one by one: whole characters, stop strings over token boundaries, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import byte_tokenizer
from skipdecode.data.detokenizer import Detokenizer
from skipdecode.engine import StepOutput

TOKENIZER = byte_tokenizer()


def outputs(tokens):
    reasons = [None] * (len(tokens) - 1) + ["length"]
    return [
        StepOutput(0, i, token, -1.0, 8, reason, 0.0, 0.0)
        for i, (token, reason) in enumerate(zip(tokens, reasons, strict=True))
    ]


def pushed(tokens, stops=()):
    """What each push returns, up to the end or a stop."""
    stream = Detokenizer(TOKENIZER, stops)
    parts = []
    for output in outputs(tokens):
        parts.append(stream.push(output))
        if stream.stopped:
            break
    return parts, stream.stopped


def text_of(parts):
    return "".join(piece.text for part in parts for piece in part)


def test_characters_of_several_tokens_come_whole():
    parts, _ = pushed(TOKENIZER("aé€😀z").input_ids)
    assert [p.text for part in parts for p in part] == ["a", "", "é", "", "", "€", "", "", "", "😀", "z"]
    assert all(len(part) == 1 for part in parts)  # each token is reported when it comes


def test_a_character_that_is_never_completed_comes_out_at_the_end():
    tokens = TOKENIZER("ab😀").input_ids[:-1]
    parts, _ = pushed(tokens)
    assert text_of(parts) == TOKENIZER.decode(tokens) == "ab\ufffd"


@given(tokens=st.lists(st.integers(0, 258), min_size=1, max_size=40))
@settings(max_examples=200)
def test_text_is_that_of_all_tokens_together(tokens):
    parts, _ = pushed(tokens)
    assert text_of(parts) == TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert [p.output.token for part in parts for p in part] == tokens


@given(text=st.text("ab", min_size=1, max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300)
def test_stop_strings_cut_and_nothing_of_them_shows(text, stops):
    tokens = TOKENIZER(text).input_ids
    stream = Detokenizer(TOKENIZER, tuple(stops))
    shown = ""
    for count, output in enumerate(outputs(tokens), 1):
        shown += "".join(piece.text for piece in stream.push(output))
        ends = [text[:count].find(s) for s in stops if s in text[:count]]
        assert stream.stopped == bool(ends)
        want = text[: min(ends)] if ends else text[:count]
        # Never more than is allowed, and no more held back than the beginning of a stop.
        assert want.startswith(shown)
        if stream.stopped or count == len(tokens):
            assert shown == want
            break
        held = want[len(shown) :]
        assert not held or any(s.startswith(held) for s in stops)


def test_a_stop_over_a_multi_byte_character():
    parts, stopped = pushed(TOKENIZER("say €5 now").input_ids, ("€5",))
    assert stopped
    assert text_of(parts) == "say "


@pytest.mark.parametrize("special", [0, 1, 2])
def test_special_tokens_have_no_text(special):
    parts, _ = pushed([*TOKENIZER("ok").input_ids, special])
    assert [p.text for part in parts for p in part] == ["o", "k", ""]
