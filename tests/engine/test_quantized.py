"""Weights of 8 bits, and weights moved into one block: their error, the kernels on them, and models decoded so."""

from __future__ import annotations

import copy

import pytest
import torch

from engine_tools import FAST, outputs_of
from kernel_reference import kernels_or_skip, reference_linear, run_linear
from skipdecode import Schedule, attach
from skipdecode.engine import FastEngine, Request
from skipdecode.engine.fast_model import open_model
from skipdecode.engine.kernels import library as kernel_library
from skipdecode.engine.kernels.spec import LinearSpec
from skipdecode.engine.kernels.weights import quantize
from skipdecode.engine.opening import open_engines
from skipdecode.errors import UsageError
from tiny import LAYERS, tiny_model, uneven_model


@pytest.mark.parametrize("kind", ["int8", "w8a8"])
@pytest.mark.parametrize("columns", [64, 100])
def test_error_is_small_and_zero_stays_zero(kind, columns):
    torch.manual_seed(0)
    weight = torch.randn(50, columns)
    weight[3] = 0
    back = quantize(weight, kind).dequantize()
    assert (back[3] == 0).all()
    assert (back - weight).norm() < 0.01 * weight.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "out", "columns"), [(1, 7, 33), (3, 64, 576), (8, 33, 130), (33, 17, 6208)])
def test_kernels_match_the_dequantized_weights(rows, out, columns, dtype):
    torch.manual_seed(0)
    weight = quantize(torch.randn(out, columns), "int8")
    spec = LinearSpec(weight, torch.randn(out), activation="relu")
    x = torch.randn(rows, columns).to(dtype).float()
    kernels = kernels_or_skip(dtype)
    got = run_linear(kernels, spec, x)
    torch.testing.assert_close(got, reference_linear(spec, x), rtol=1e-4, atol=2e-4)
    for few in (1, 2, 5):
        assert torch.equal(run_linear(kernels, spec, x[:few]), got[:few])


def eight_bits(x):
    """Rows as w8a8 weights meet them."""
    groups = []
    for group in x.split(256, -1):
        step = group.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        groups.append((group / step).round() * step)
    return torch.cat(groups, -1)


@pytest.mark.parametrize("prologue", ["none", "rms_norm", "swiglu"])
@pytest.mark.parametrize(
    ("rows", "out", "columns"), [(1, 7, 33), (2, 64, 576), (5, 33, 130), (33, 17, 6208), (50, 100, 64)]
)
def test_w8a8_is_exact_in_bytes(rows, out, columns, prologue):
    kernels = bytes_or_skip()
    torch.manual_seed(0)
    held = quantize(torch.randn(out, columns), "w8a8")
    x = torch.randn(rows, columns * (2 if prologue == "swiglu" else 1))
    x[0] = 0
    first = LinearSpec(torch.eye(columns), None, prologue, torch.rand(columns), eps=1e-5)
    bias, before = torch.randn(out), torch.randn(rows, out)
    spec = LinearSpec(held, bias, prologue, first.gamma, eps=1e-5, activation="relu")
    want = before + reference_linear(LinearSpec(held, bias, activation="relu"), eight_bits(reference_linear(first, x)))
    # A number just between two bytes may fall to either.
    assert (run_linear(kernels, spec, x, before) - want).norm() < 2e-3 * want.norm()


def bytes_or_skip():
    kernels = kernels_or_skip()
    if not kernels.multiplies_bytes:
        pytest.skip("no product of bytes on this CPU")
    return kernels


def test_w8a8_is_refused_in_one_line_where_the_cpu_does_not_multiply_bytes(monkeypatch):
    kernels_or_skip()
    monkeypatch.setattr(kernel_library.load_library(), "skipdecode_multiplies_bytes", lambda: 0)
    with pytest.raises(UsageError, match="AVX512_VNNI"):
        open_model(tiny_model("llama"), quantization="w8a8")


NESTED = Schedule.from_speedup(LAYERS, 2, 12)
BF16 = ["ernie4_5", "gemma2", "gemma3_text", "gpt2", "granite", "olmo2", "phi3"]
W8A8 = ["llama", "opt", "qwen2", "gemma3_text", "gpt2"]


@pytest.mark.parametrize(
    ("quantization", "family", "dtype", "schedule"),
    [
        *((None, family, torch.bfloat16, NESTED) for family in BF16),
        *(("w8a8", family, dtype, NESTED) for family in W8A8 for dtype in (torch.float32, torch.bfloat16)),
        *(("w8a8", "llama", torch.float32, NESTED.with_prompt(prompt)) for prompt in ((0, 1, 2), (0,))),
    ],
    ids=str,
)
def test_rows_are_the_same_alone_and_in_any_batch(quantization, family, dtype, schedule):
    if quantization == "w8a8":
        bytes_or_skip()
    fast = open_model(uneven_model(family).to(dtype), quantization=quantization)
    prompts, new = [(5, 6, 7, 8), (9, 3), tuple(i % 90 + 3 for i in range(60)), (4,) * 30], 12
    together = decoded(fast, schedule, prompts, new, prompt_tokens=16)
    assert fast.name == ("fast" if quantization is None else f"fast-{quantization}")
    assert together == [decoded(fast, schedule, [prompt], new)[0] for prompt in prompts]


def dequantized_twin(model):
    """The model with every projection and the output embedding as the quantised engine reads them."""
    twin = copy.deepcopy(model)
    if twin.lm_head.weight is twin.get_input_embeddings().weight:
        twin.lm_head.weight = torch.nn.Parameter(twin.lm_head.weight.clone())
    with torch.no_grad():
        for module in twin.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(quantize(module.weight, "int8").dequantize(module.weight.dtype))
    return twin


def decoded(fast, schedule, prompts, new, **options):
    rows = outputs_of(FastEngine(fast, schedule, **options), [Request(p, new) for p in prompts])
    return [[(out.token, out.logprob) for out in row] for row in rows]


@pytest.mark.parametrize("family", ["llama", "opt", "qwen2", "gemma3_text", "granite", "phi3"])
def test_decoding_is_that_of_the_dequantized_model_under_a_schedule(family):
    kernels_or_skip()
    model = tiny_model(family)
    prompts, new = [(5, 6, 7, 8), (9, 3), tuple(range(3, 23))], 12
    got = decoded(open_model(model, quantization="int8"), NESTED, prompts, new)
    twin = dequantized_twin(model)
    with attach(twin, NESTED):
        for prompt, row in zip(prompts, got, strict=True):
            text = twin.generate(
                torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            assert [token for token, _ in row] == text[0, len(prompt) :].tolist()


def test_unknown_quantization_is_refused():
    with pytest.raises(UsageError, match="accepted are none, int8, w8a8"):
        open_engines(tiny_model("llama"), "auto", print, "int2")


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


def test_projections_lie_in_one_block_in_order_move_once_and_are_shared():
    model = tiny_model("llama")
    open_model(model)
    projections = [p for n, p in model.model.layers.named_parameters() if "proj" in n]
    assert len({p.untyped_storage().data_ptr() for p in projections}) == 1
    attention = [layer.self_attn.q_proj.weight.data_ptr() for layer in model.model.layers]
    assert attention == sorted(attention)
    places = [p.data_ptr() for p in projections]
    again = open_model(model)
    assert [p.data_ptr() for p in projections] == places
    assert again.spec.layers[0].qkv.weight.data_ptr() == attention[0]


def test_a_tied_output_embedding_stays_tied():
    model = tiny_model("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    open_model(model)
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
