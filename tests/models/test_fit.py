"""Fits: bridges over skipped layers and given keys and values of prompts, against the uncached oracle."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import skipdecode
from checkpoints import save_checkpoint
from every import decoded, suited
from fits import projections, random_fit
from oracle import active_tokens, alone_logits, oracle_logits, position_ids
from products import in_turn
from skipdecode import LLM, Schedule, attach
from skipdecode.cli import main
from skipdecode.cli.eval import Config
from skipdecode.data.batches import collate
from skipdecode.data.examples import Example
from skipdecode.engine.fast import FastEngine
from skipdecode.engine.gated import GatedEngine
from skipdecode.engine.requests import Request
from skipdecode.errors import DepthWarning, FitError, UntunedScheduleWarning, UsageError
from skipdecode.evaluation.scores import token_fidelity
from skipdecode.learning.fitting import make_fit
from skipdecode.learning.settings import FitOptions
from skipdecode.models.checkpoint_schedule import FIT_FILE, bundled_schedules, schedule_file
from skipdecode.models.families import decoder_layers, keys_and_values, projects
from skipdecode.models.fit import Fit, set_fit
from skipdecode.models.fit_maps import PromptMap
from skipdecode.models.loading.checkpoint import open_checkpoint
from skipdecode.models.loading.hub import load_model
from skipdecode.models.loading.weights_sample import base_sample
from textgen_tools import save_tiny_model
from tiny import LATER, LAYERS, OPTIONS, ragged_prompts, shared_model, tiny_model

NEW = 12
TOLERANCE = 1e-4
LOWER = (0, 1, 2)
GAPS = (0, 1, 3, 6)


def decode(model, schedule, fit, ids, mask):
    out = decoded(model, schedule, ids, mask, NEW, fit=fit)
    return out.sequences, torch.stack(out.logits, 1)


@torch.no_grad()
def check(model, schedule, fit):
    ids, mask = ragged_prompts()
    text, logits = decode(model, schedule, fit, ids, mask)
    prompt = ids.shape[1]
    long_mask = torch.cat([mask, mask.new_ones(len(ids), NEW)], 1)
    active = active_tokens(schedule, prompt, text.shape[1])
    expected = oracle_logits(model, text, long_mask, active, fit, schedule, prompt)
    assert (logits - expected[:, prompt - 1 : -1]).abs().max() < TOLERANCE
    without = oracle_logits(model, text, long_mask, active)
    assert (without - expected)[:, prompt:].abs().max() > 100 * TOLERANCE, "the fit must matter for this test"
    for row in range(len(ids)):
        alone = alone_logits(model, schedule, text, mask, prompt, row, fit)
        assert (logits[row] - alone).abs().max() < TOLERANCE


FALLING = Schedule(LAYERS, (4, 1, 6, 3, 5, 2), (8, 7, 7, 4, 4, 3, 2), name="falling")
FLAT = Schedule.even(LAYERS, (5,))
SCHEDULES = {"falling": FALLING, "flat": FLAT}
PROMPTS = {"full": ("full", 0), "max-exit": ("max_exit", 0), "lower": (LOWER, 0), "taps": (LOWER, 2), "gaps": (GAPS, 1)}


@pytest.mark.parametrize(("family", "prompts", "name"), in_turn(sorted(OPTIONS), PROMPTS, SCHEDULES, slow=LATER))
def test_every_family_equals_the_oracle(family: str, prompts: str, name: str):
    model, (prompt, taps) = shared_model(family), PROMPTS[prompts]
    schedule = replace(SCHEDULES[name], prompt=prompt)
    if (schedule := suited(family, schedule)) is None:
        return
    if isinstance(prompt, str):
        check(model, schedule, random_fit(model))
    elif None not in projections(model):
        check(model, schedule, random_fit(model, [prompt], taps=taps))
    else:
        fit = Fit(LAYERS, model.config.hidden_size, {}, {prompt: {n: _map(model) for n in range(LAYERS)}})
        with pytest.raises(FitError, match="one product"):
            attach(model, schedule, fit)


def _map(model):
    return PromptMap(torch.zeros(8, model.config.hidden_size), torch.zeros(8), torch.zeros(8))


def test_prompts_of_another_set_are_projected():
    model, schedule = shared_model("llama"), replace(Schedule.from_speedup(LAYERS, 2, seq_len=8), prompt=GAPS)
    whole = random_fit(model, [LOWER])
    fit = Fit(LAYERS, model.config.hidden_size, {}, {LOWER: {n: whole.prompt_maps(LOWER)[n] for n in range(3, LAYERS)}})
    ids, mask = ragged_prompts()
    assert torch.equal(decode(model, schedule, fit, ids, mask)[1], decode(model, schedule, None, ids, mask)[1])


def fast_cases():
    """Six families with every prompt; in the default suite Llama has all prompts, and the others take turns."""
    for number, family in enumerate(("llama", "opt", "gemma3_text", "gpt2", "qwen3", "mistral")):
        for place, prompt in enumerate(PROMPTS):
            marks = () if number == 0 or (number + place) % 3 == 0 else pytest.mark.slow
            yield pytest.param(family, prompt, marks=marks, id=f"{family}-{prompt}")


@pytest.mark.parametrize(("family", "name"), fast_cases())
def test_the_fast_engine_equals_the_gates(family: str, name: str):
    """In batches, with parts of prompts of a few tokens, and with a prefix cache."""
    model, (prompt, taps) = tiny_model(family).eval(), PROMPTS[name]
    prompts = [] if isinstance(prompt, str) or None in projections(model) else [prompt]
    set_fit(model, random_fit(model, prompts, taps=taps))
    schedule = replace(Schedule.from_speedup(LAYERS, 2, seq_len=8), prompt=prompt)
    random = torch.Generator().manual_seed(3)
    first = torch.randint(3, 100, (40,), generator=random).tolist()
    texts = [first, [*first[:33], 7, 8, 9], [5, 6], torch.randint(3, 100, (21,), generator=random).tolist(), [4]]
    requests = [Request(tuple(text), max_new_tokens=NEW) for text in texts]
    expected = [row.tokens for row in GatedEngine(model, schedule, max_rows=1).decode(requests)]
    for options in ({"max_rows": 4}, {"max_rows": 2, "prompt_tokens": 8}, {"max_rows": 3, "prefix_cache": True}):
        engine = FastEngine(model, schedule, **options)
        assert [row.tokens for row in engine.decode(requests)] == expected, options
        if options.get("prefix_cache"):
            assert [row.tokens for row in engine.decode(requests)] == expected
            assert engine.stats.prefix_hit_tokens


def test_a_bridge_of_rank_0_is_its_bias_on_both_engines():
    model = tiny_model("llama").eval()
    requests = [Request((5, 6, 7), max_new_tokens=NEW), Request((9,), max_new_tokens=NEW)]
    bare = [row.tokens for row in FastEngine(model, FLAT, max_rows=2).decode(requests)]
    set_fit(model, random_fit(model, rank=0))
    engines = FastEngine(model, FLAT, max_rows=2), GatedEngine(model, FLAT, max_rows=1)
    fast, gated = ([row.tokens for row in engine.decode(requests)] for engine in engines)
    assert fast == gated != bare


def test_a_schedule_that_a_fit_is_for_is_not_told_as_untuned():
    model = tiny_model("llama")
    fit = random_fit(model, [LOWER])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(model, replace(FLAT, prompt=LOWER), fit).detach()
    with pytest.warns(UntunedScheduleWarning, match="for other layers or prompts .*prompts that run 3 layers"):
        attach(model, replace(FLAT, prompt=GAPS), fit).detach()
    half = Fit(LAYERS, model.config.hidden_size, fit.bridges_over(FLAT.dropped[:1]), {})
    with pytest.warns(UntunedScheduleWarning, match="not tuned under"):
        attach(model, FLAT, half).detach()


@pytest.mark.parametrize("family", ["llama", "opt", "gemma3_text", "qwen3"])
@pytest.mark.parametrize("taps", [0, 2])
def test_chunks_of_a_prompt_and_a_second_turn_take_the_fit(family, taps):
    model, schedule = shared_model(family), replace(FLAT, prompt=LOWER)
    fit = random_fit(model, [LOWER], taps=taps)
    ids = torch.randint(3, 100, (1, 23), generator=torch.Generator().manual_seed(1))
    prompt, turn = 12, 19
    with attach(model, schedule, fit) as attachment, torch.no_grad():
        whole, parts = (attachment.new_cache(prompt) for _ in range(2))
        expected = model(ids[:, :turn], past_key_values=whole, use_cache=True).logits[:, prompt - 1 :]
        pieces = [model(ids[:, a:b], past_key_values=parts, use_cache=True).logits for a, b in ((0, 5), (5, prompt))]
        steps = [model(ids[:, n : n + 1], past_key_values=parts, use_cache=True).logits for n in range(prompt, turn)]
        found = torch.cat([pieces[-1][:, -1:], *steps], 1)
        assert (found - expected).abs().max() < TOLERANCE
        with pytest.warns(DepthWarning):
            later = [model(ids[:, turn:], past_key_values=cache, use_cache=True).logits for cache in (whole, parts)]
        assert (later[0] - later[1]).abs().max() < TOLERANCE
    active = active_tokens(schedule, prompt, turn)
    oracle = oracle_logits(model, ids[:, :turn], torch.ones_like(ids[:, :turn]), active, fit, schedule, prompt)
    assert (oracle[:, prompt - 1 :] - expected).abs().max() < TOLERANCE


def test_a_file_gives_the_same_fit(tmp_path):
    model = shared_model("llama")
    fit = random_fit(model, [LOWER, GAPS], taps=1)
    fit.half().float().save(tmp_path / "skipdecode.fit")  # numbers that 16 bits hold
    loaded = Fit.load(tmp_path / "skipdecode.fit")
    assert (loaded.prompt_sets, loaded.context_tokens, loaded.num_layers) == ((LOWER, GAPS), 1, LAYERS)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in fit.state_dict().items())


FITTED = ["gemma3_text", "gpt2", "granitemoehybrid", "llama", "opt"]
OTHERS = [each for each in (*OPTIONS, *LATER) if each not in FITTED and "gemma3n" not in each and "gemma4" not in each]


@pytest.mark.parametrize("family", [*FITTED, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_fitting_brings_a_skipping_model_closer_to_full_depth(family):
    model = shared_model(family)
    random = torch.Generator().manual_seed(5)
    texts = torch.randint(3, 100, (40, 40), generator=random).tolist()
    examples = [Example(str(i), tuple(text[:20]), tuple(text[20:])) for i, text in enumerate(texts)]
    batches = [collate(examples[i : i + 5]) for i in range(0, 40, 5)]
    maps = projects(model.config) and all(map(keys_and_values, decoder_layers(model)))
    schedules = [FALLING, replace(FALLING, prompt="max_exit"), replace(Schedule.full(LAYERS), prompt=LOWER)]
    for schedule in schedules[: 2 + maps]:
        fit = make_fit(model, batches, FitOptions(fit_rank=16, fit_taps=1), [schedule])
        pairs = [text[:20] for text in texts[:10]], [text[20:] for text in texts[:10]]
        distance = {}
        for name, used in (("fitted", fit), ("skipped", None)):
            set_fit(model, used)
            distance[name] = sum(row["kl"].mean() for row in token_fidelity(model, schedule, *pairs))
            set_fit(model, None)
        assert distance["fitted"] < (0.9 if family in FITTED else 1) * distance["skipped"], schedule.name


@pytest.mark.parametrize("prompt", ["full", "max_exit", LOWER, GAPS])
@pytest.mark.parametrize("family", ["llama", "opt", "gemma3_text"])
def test_gradients_of_weights_and_fit_equal_the_oracle_s(family, prompt):
    model, schedule = tiny_model(family), replace(FALLING, prompt=prompt)
    fit = random_fit(model, [p for p in (prompt,) if not isinstance(p, str)], taps=1).requires_grad_(True)
    parameters = dict(model.named_parameters()) | dict(fit.named_parameters())
    ids, mask = ragged_prompts((12, 9, 12))
    labels = ids.clone()
    labels[:, :5] = -100
    with attach(model, schedule, fit) as attached:
        attached.model(input_ids=ids, attention_mask=mask, labels=labels, **position_ids(model, mask)).loss.backward()
    found = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    assert any("bridges" in name for name in found)
    assert isinstance(prompt, str) or any("maps" in name for name in found)
    for parameter in parameters.values():
        parameter.grad = None
    logits = oracle_logits(model, ids, mask, active_tokens(schedule, 5, 12), fit, schedule, 5)
    torch.nn.functional.cross_entropy(logits[:, 4:-1].flatten(0, 1), ids[:, 5:].flatten()).backward()
    for name, parameter in parameters.items():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # A gate leaves out what gets no gradient; the oracle's hooks multiply it by zero.
        torch.testing.assert_close(found.get(name, torch.zeros_like(parameter)), expected, atol=1e-4, rtol=1e-4)


def test_the_bundled_fit_serves_its_schedules_and_takes_six_megabytes():
    files = bundled_schedules("smollm2-135m")
    assert [Path(file).stem for file in files] == [f"smollm2-135m-{name}" for name in ("1.2x-p22", "1.2x", "1.4x")]
    place = Path(files[0]).parent / FIT_FILE
    fit = Fit.load(place)
    assert all(fit.serves(Schedule.load(file)) for file in files)
    assert place.stat().st_size <= 6e6
    assert schedule_file("smollm2-135m-1.4x") == files[-1]
    assert schedule_file("./smollm2-135m-1.4x") == "./smollm2-135m-1.4x"


def test_a_model_by_name_uses_the_fit_beside_its_schedules(tmp_path):
    model = save_checkpoint(tmp_path / "model")
    for seed, name in enumerate(("one", "two", "bare")):
        (tmp_path / name).mkdir()
        Schedule.constant(LAYERS, LAYERS - 2).save(tmp_path / name / "s.json")
        if name != "bare":
            random_fit(model, seed=seed).save(tmp_path / name / "skipdecode.fit")
    one, two, bare = (str(tmp_path / name / "s.json") for name in ("one", "two", "bare"))
    name = str(tmp_path / "model")
    assert open_checkpoint(name).fit is open_checkpoint(name, schedules=[bare]).fit is None
    assert open_checkpoint(name, schedules=[one, bare]).fit.file == tmp_path / "one" / "skipdecode.fit"
    with pytest.raises(UsageError, match="a model uses one"):
        load_model(open_checkpoint(name, schedules=[one, two]))
    texts = {file: LLM(name, file, device="cpu").generate("ab", 8)[0].tokens for file in (one, two, bare)}
    assert len({tuple(tokens) for tokens in texts.values()}) == 3
    random_fit(model, seed=3).save(tmp_path / "model" / "skipdecode.fit")
    assert open_checkpoint(name, schedules=[bare]).fit.file == tmp_path / "model" / "skipdecode.fit"
    assert open_checkpoint(name, schedules=[two]).fit.file == tmp_path / "two" / "skipdecode.fit"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A tiny model's directory, and a schedule with a fit beside it."""
    where = tmp_path_factory.mktemp("calibrated")
    save_tiny_model(where / "model")
    model = load_model(where / "model", dtype="float32").model
    schedule = replace(Schedule.even(LAYERS, (5,), name="half"), prompt=LOWER)
    schedule.save(where / "schedule.json")
    fit = random_fit(model, [LOWER])
    fit.about["base"] = base_sample(model)
    fit.save(where / FIT_FILE)
    return where, model


WRONG = {
    "other weights": (lambda fit, model: fit.about.update(base=[-n for n in fit.about["base"]]), "other weights"),
    "other layers": (lambda fit, model: random_fit(tiny_model("llama", num_hidden_layers=6)), "6 layers"),
    "other prompts": (lambda fit, model: random_fit(model, [GAPS]), "run layers [0, 1, 3, 6]"),
    "cut off": (None, "cannot be read"),
}


@pytest.mark.parametrize("verb", ["generate", "serve", "plan"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_fit_is_refused_in_one_line(calibrated, tmp_path, capsys, wrong, verb):
    where, model = calibrated
    change, said = WRONG[wrong]
    path = tmp_path / FIT_FILE
    (tmp_path / "schedule.json").write_bytes((where / "schedule.json").read_bytes())
    fit = Fit.load(where / FIT_FILE)
    if change is None:
        path.write_bytes((where / FIT_FILE).read_bytes()[:200])
    else:
        (change(fit, model) or fit).save(path)
    more = {"generate": ["x"], "serve": ["--port", "0"], "plan": []}[verb]
    command = [verb, str(where / "model"), *more, "--schedule", str(tmp_path / "schedule.json")]
    if verb == "plan" and wrong == "other weights":
        return  # plan reads no weights
    assert main(command) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if said in line]
    assert len(lines) == 1
    assert str(path) in lines[0]


def test_too_few_tokens_to_fit_are_refused_before_anything_is_measured(calibrated, tmp_path):
    form = {"prompt_field": "p", "response_field": "r", "nominal_speedup": 2, "records": 4}
    data = [{"p": "red", "r": "a"}]
    with pytest.raises(UsageError, match="too few to fit"):
        skipdecode.calibrate(calibrated[0] / "model", data, out=tmp_path / "out", **form)
    assert not (tmp_path / "out" / "measured.sqlite").exists()


def test_a_tuned_fit_that_is_not_used_is_told(calibrated, tmp_path, capsys, monkeypatch):
    where, _ = calibrated
    shutil.copytree(where / "model", tmp_path / "tuned")
    shutil.copy(where / FIT_FILE, tmp_path / "tuned")
    shutil.copy(where / "schedule.json", tmp_path / "tuned" / "half.json")
    call = ["generate", str(tmp_path / "tuned"), "ab", "--max-new-tokens", "2", "--schedule"]
    assert main([*call, str(where / "schedule.json")]) == 0
    said = capsys.readouterr().err
    assert f"fit {where / FIT_FILE}:" not in said  # with --debug only
    assert f"own fit, {tmp_path / 'tuned' / FIT_FILE}, is not used: copy the schedule beside it" in said
    assert main([*call, str(tmp_path / "tuned" / "half.json")]) == 0
    assert "is not used" not in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "tuned", "ab", "--max-new-tokens", "2", "--schedule", "tuned/half.json"]) == 0
    assert "is not used" not in capsys.readouterr().err


def test_eval_takes_the_fit_beside_the_schedules_of_its_methods(calibrated):
    where, _ = calibrated
    for named in ([str(where / "schedule.json")], ["full", str(where / "schedule.json")]):
        assert Config(model=str(where / "model"), schedule=named).checkpoint.fit.file == where / FIT_FILE
    assert Config(model=str(where / "model"), schedule=("full", "2x")).checkpoint.fit is None
