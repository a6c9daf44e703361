"""Choice of tokens: settings act as transformers' do, and rows keep to themselves."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from skipdecode import Schedule
from skipdecode.engine import FastEngine, GatedEngine
from skipdecode.engine.requests import Request, Sampling
from skipdecode.engine.sampling import Predictions, Sampler
from skipdecode.errors import UsageError
from tiny import LAYERS, tiny_model

VOCAB = 40


def logits(seed=0):
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draws(sampling, count=4000, prompt=(1,)):
    row, values = Sampler(sampling, prompt), logits()
    return torch.bincount(torch.tensor([row.pick(values) for _ in range(count)]), minlength=VOCAB) / count


@pytest.mark.parametrize(
    ("sampling", "warpers"),
    [
        (Sampling(temperature=0.7, seed=1), [hf.TemperatureLogitsWarper(0.7)]),
        (Sampling(temperature=1.0, top_k=5, seed=1), [hf.TopKLogitsWarper(5)]),
        (Sampling(temperature=2.0, top_p=0.6, seed=1), [hf.TemperatureLogitsWarper(2.0), hf.TopPLogitsWarper(0.6)]),
        (Sampling(temperature=1.0, min_p=0.1, seed=1), [hf.MinPLogitsWarper(0.1)]),
        (
            Sampling(temperature=1.5, top_k=20, top_p=0.8, min_p=0.05, seed=1),
            [
                hf.TemperatureLogitsWarper(1.5),
                hf.TopKLogitsWarper(20),
                hf.TopPLogitsWarper(0.8),
                hf.MinPLogitsWarper(0.05),
            ],
        ),
    ],
)
def test_distribution_is_transformers(sampling, warpers):
    want = LogitsProcessorList(warpers)(torch.tensor([[1]]), logits()[None])[0].softmax(0)
    got = draws(sampling)
    assert set(got.nonzero().flatten().tolist()) <= set(want.nonzero().flatten().tolist())
    assert (got - want).abs().sum() < 0.1


@pytest.mark.parametrize("scale", [3.0, 0.3], ids=["within the nearest tokens", "beyond them"])
def test_nucleus_of_a_large_vocabulary_is_transformers(scale):
    values = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * scale
    want = hf.TopPLogitsWarper(0.6)(torch.tensor([[1]]), values[None])[0].softmax(0)
    row = Sampler(Sampling(top_p=0.6, temperature=1.0, seed=1), (1,))
    got = torch.bincount(torch.tensor([row.pick(values) for _ in range(20_000)]), minlength=len(values)) / 20_000
    assert (int((want > 0).sum()) > 512) == (scale < 1)
    assert not got[want == 0].any()
    assert (got - want).abs().sum() < 0.2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_frequency_and_presence_penalty_count_the_output_alone(temperature):
    """OpenAI's formula: logit - times in the output x frequency - (in the output) x presence."""
    values, prompt = logits(), (int(logits().argmax()), 5)
    sampling = Sampling(temperature=temperature, frequency_penalty=0.7, presence_penalty=1.5, seed=3)
    row, other = Sampler(sampling, prompt), Sampler(Sampling(temperature=temperature, seed=3), prompt)
    times = torch.zeros(VOCAB)
    for _ in range(12):
        want = other.pick(values - 0.7 * times - 1.5 * (times > 0))
        token = row.pick(values)
        assert token == want
        times[token] += 1
    assert times.max() > 1
    negative = Sampler(Sampling(frequency_penalty=-2), ())
    assert len({negative.pick(values) for _ in range(5)}) == 1


@pytest.mark.parametrize("kind", [FastEngine, GatedEngine])
def test_penalties_act_per_row_in_both_engines_whatever_the_batch(kind):
    model, schedule = tiny_model("llama"), Schedule.from_speedup(LAYERS, 2, 20)
    settings = [
        Sampling(),
        Sampling(frequency_penalty=2.0, presence_penalty=1.0),
        Sampling(repetition_penalty=1.6),
        Sampling(temperature=1.0, min_p=0.02, presence_penalty=-1.0, seed=5),
    ]
    requests = [Request((5, 6, 7, 8), 20, sampling) for sampling in settings]
    together = [row.tokens for row in kind(model, schedule).decode(requests)]
    assert together == [kind(model, schedule).decode([request])[0].tokens for request in requests]
    assert len({tuple(row) for row in together}) == 4
    # The greedy text has repetitions, which a penalty takes out of its own row alone.
    assert len(set(together[1])) > len(set(together[0]))


def test_bias_acts_and_leaves_the_logits_alone():
    values = logits()
    before = values.clone()
    assert Sampler(Sampling(logit_bias={7: 100.0}), ()).pick(values) == 7
    assert torch.equal(values, before)
    top = int(values.argmax())
    assert Sampler(Sampling(logit_bias={top: -100.0}), ()).pick(values) != top


def test_logprob_is_the_models_own():
    values = torch.stack([logits(0), logits(1)])
    sampling = Sampling(temperature=0.3, top_k=2, repetition_penalty=1.5, presence_penalty=1, seed=0)
    rows = [Sampler(sampling, (5,)), Sampler(Sampling(), ())]
    predicted = Predictions(values)
    tokens, logprobs, _ = zip(*(predicted.token(i, row) for i, row in enumerate(rows)), strict=True)
    want = values.log_softmax(-1)[torch.arange(2), torch.tensor(tokens)]
    torch.testing.assert_close(torch.tensor(logprobs), want)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampling(temperature=-1), "temperature=-1"),
        (lambda: Sampling(top_p=0), "top_p=0"),
        (lambda: Sampling(min_p=2), "min_p=2"),
        (lambda: Sampling(top_k=-1), "top_k=-1"),
        (lambda: Sampling(repetition_penalty=0), "repetition_penalty=0"),
        (lambda: Sampling(frequency_penalty=2.5), "frequency_penalty=2.5"),
        (lambda: Sampling(presence_penalty=-3), "presence_penalty=-3"),
        (lambda: Request((), 1), "at least one token"),
        (lambda: Request((1,), 0), "max_new_tokens=0"),
    ],
)
def test_bad_settings_are_refused_by_name(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_the_likeliest_token_stays_however_little_is_allowed():
    for sampling in (Sampling(temperature=1.0, top_p=5e-324, seed=1), Sampling(temperature=1.0, min_p=1.0, seed=1)):
        assert Sampler(sampling, (1,)).pick(logits()) == int(logits().argmax())
