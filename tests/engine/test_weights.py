"""A model whose projections were moved into one block is the same model."""

from __future__ import annotations

import copy

import pytest
import torch

from engine_tools import FAST
from kernel_reference import kernels_or_skip
from skipdecode.engine.fast_model import open_model
from tiny import tiny_model


@pytest.fixture(autouse=True)
def with_kernels() -> None:
    kernels_or_skip()


@pytest.mark.parametrize("family", FAST)
def test_parameters_keep_their_values_and_the_model_its_function(family):
    model = tiny_model(family)
    before, ids = copy.deepcopy(model.state_dict()), torch.arange(3, 20)[None]
    with torch.no_grad():
        logits = model(ids).logits
        open_model(model)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        torch.testing.assert_close(model(ids).logits, logits)


def test_projections_lie_in_one_block_in_order_and_move_once():
    model = tiny_model("llama")
    open_model(model)
    projections = [p for n, p in model.model.layers.named_parameters() if "proj" in n]
    assert len({p.untyped_storage().data_ptr() for p in projections}) == 1
    attention = [layer.self_attn.q_proj.weight.data_ptr() for layer in model.model.layers]
    assert attention == sorted(attention)
    places = [p.data_ptr() for p in projections]
    open_model(model)
    assert [p.data_ptr() for p in projections] == places


def test_a_tied_output_embedding_stays_tied():
    model = tiny_model("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    open_model(model)
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
