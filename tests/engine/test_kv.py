"""Paged keys and values: what is held is what is needed."""

from __future__ import annotations

import torch

from skipdecode.engine.kv import PagedKV


def store(pages=20, slots=2, tokens=16):
    kv = PagedKV(3, 2, 8, torch.bfloat16, page_tokens=4)
    kv.reserve(slots, tokens, pages)
    return kv


def test_pages_are_taken_by_layer_and_given_back():
    kv = store()
    slot = kv.open()
    kv.extend(slot, (0, 2), 5)
    assert kv.pages_held == 4
    assert kv.bytes_held == 4 * (2 * 2 * 4 * 8 * 2)
    kv.extend(slot, (0,), 8)
    assert kv.pages_held == 4
    kv.extend(slot, (0,), 9)
    assert kv.pages_held == 5
    kv.drop(slot, (2,))
    assert kv.pages_held == 3
    kv.close(slot)
    assert kv.pages_held == 0


def test_growing_keeps_what_is_held():
    kv = store(pages=3, slots=1, tokens=4)
    slot = kv.open()
    kv.extend(slot, range(3), 4)
    kv.pages.fill_(7)
    before = kv.table[:, slot, 0].clone()
    kv.reserve(3, 40, 12)
    assert torch.equal(kv.table[:, slot, 0], before)
    assert (kv.pages[:3] == 7).all()
    kv.extend(slot, range(3), 16)
    assert kv.pages_held == 12
    assert kv.open() != kv.open()
