"""attach and detach: nothing stays behind, and what cannot be gated is refused."""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, RwkvConfig, RwkvForCausalLM, T5Config

import skipdecode
from checkpoints import save_checkpoint
from oracle import layer_list
from skipdecode import Schedule, attach, detach
from skipdecode.errors import (
    AlreadyAttachedError,
    DepthWarning,
    ScheduleError,
    UnsupportedModelError,
    UntunedScheduleWarning,
)
from skipdecode.models.loading.hub import load_model
from tiny import LAYERS, ragged_prompts, tiny_model

PAPER = Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=6, seq_len=8)
IDS = torch.arange(3, 27).view(2, 12)


def fingerprint(model):
    layers = list(layer_list(model))
    return (
        [(id(m), type(m), sorted(m.__dict__)) for m in layers],
        list(model.state_dict()),
        sorted(model.__dict__),
        len(model._forward_hooks),
        len(model._forward_pre_hooks),
    )


def greedy(model, new=10):
    ids, mask = ragged_prompts()
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False)


def test_everything_is_restored_after_an_exception():
    model = tiny_model("gpt2")
    before = fingerprint(model)

    def interrupt(*_):
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"), attach(model, PAPER):
        model.generate(input_ids=torch.tensor([[5, 6]]), stopping_criteria=[interrupt], max_new_tokens=4)
    assert fingerprint(model) == before


def test_without_with():
    model = tiny_model("llama")
    before = fingerprint(model)
    attachment = attach(model, PAPER)
    skipped = greedy(model)
    attachment.detach()
    attachment.detach()
    detach(model)
    assert fingerprint(model) == before
    attach(model, PAPER)
    assert torch.equal(greedy(model), skipped)
    detach(model)
    assert fingerprint(model) == before


def test_state_dict_keeps_its_names_while_attached(tmp_path):
    model = tiny_model("llama")
    names = list(model.state_dict())
    with attach(model, PAPER):
        assert list(model.state_dict()) == names
        model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(greedy(again), greedy(model))


def test_attaching_twice_is_refused():
    model = tiny_model("llama")
    with attach(model, PAPER):
        with pytest.raises(AlreadyAttachedError, match="attached"):
            attach(model, PAPER)
        assert type(layer_list(model)[0]).__name__ == "LlamaDecoderLayer"


def test_two_models_of_one_class_do_not_meet():
    one, two = tiny_model("llama"), tiny_model("llama", seed=9)
    text = greedy(two)
    with attach(one, PAPER):
        assert torch.equal(greedy(two), text)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: RwkvForCausalLM(RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=99)), "rows"),
        (lambda: AutoModelForSeq2SeqLM.from_config(T5Config(d_model=16, num_layers=2, vocab_size=99)), "t5"),
        (lambda: tiny_model("llama").model, "LlamaModel"),
        (lambda: torch.nn.Linear(2, 2), "Linear"),
    ],
)
def test_unsupported_models_are_named_and_the_table_listed(make, named):
    with pytest.raises(UnsupportedModelError, match=named) as error:
        attach(make(), PAPER)
    assert "llama" in str(error.value) or "AutoModelForCausalLM" in str(error.value)


def test_a_schedule_for_another_model_is_refused():
    model = tiny_model("llama")
    before = fingerprint(model)
    with pytest.raises(ScheduleError, match="12 layers, but the model has 8"):
        attach(model, Schedule.constant(12, 6))
    with pytest.raises(ScheduleError, match="Schedule"):
        attach(model, {"num_layers": 8})
    assert fingerprint(model) == before


def test_the_schedule_can_be_changed_between_texts():
    model = tiny_model("llama")
    with attach(model, PAPER) as attachment:
        first = greedy(model)
        attachment.schedule = Schedule.full(LAYERS)
        assert not torch.equal(greedy(model), first)
        with pytest.raises(ScheduleError):
            attachment.schedule = Schedule.full(LAYERS + 1)
        attachment.schedule = PAPER
        assert torch.equal(greedy(model), first)


def test_paused_is_full_depth():
    model = tiny_model("llama")
    plain = model(input_ids=IDS).logits
    text = greedy(model)
    with attach(model, PAPER) as attachment:
        skipped = greedy(model)
        with attachment.paused():
            assert torch.equal(model(input_ids=IDS, labels=IDS).logits, plain)
            assert torch.equal(greedy(model), text)
        assert not torch.equal(model(input_ids=IDS, labels=IDS).logits, plain)
        assert torch.equal(greedy(model), skipped)


def test_forward_called_by_name_goes_the_same_way():
    model = tiny_model("llama")
    with attach(model, PAPER), torch.no_grad():
        assert torch.equal(model.forward(IDS, labels=IDS).logits, model(input_ids=IDS, labels=IDS).logits)
        assert "labels" in inspect.signature(model.forward).parameters, "trainers choose columns by the signature"


def test_a_forward_wrapped_by_another_tool_after_attaching_survives_detach():
    model = tiny_model("llama")
    plain = model(input_ids=IDS, labels=IDS).logits
    attachment = attach(model, PAPER)
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    attachment.detach()
    assert torch.equal(model(input_ids=IDS, labels=IDS).logits, plain)


def test_an_interrupt_in_a_forward_leaves_no_plan_behind():
    model = tiny_model("llama")
    plain = model.model(input_ids=IDS).last_hidden_state

    def interrupt(*_):
        raise KeyboardInterrupt

    with attach(model, PAPER):
        handle = model.lm_head.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=IDS, prompt_length=2)
        handle.remove()
        with pytest.warns(DepthWarning):
            assert torch.equal(model.model(input_ids=IDS).last_hidden_state, plain)


def test_backward_may_come_after_detach():
    model = tiny_model("llama").train()
    grads = []
    for late in (False, True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        with attach(model, PAPER):
            loss = model(input_ids=IDS, labels=IDS).loss
            if not late:
                loss.backward()
        if late:
            loss.backward()
        grads.append(model.lm_head.weight.grad.clone())
    assert torch.equal(*grads)


def test_an_attached_model_can_be_copied():
    model = tiny_model("llama")
    with attach(model, PAPER):
        twin = copy.deepcopy(model)
        assert torch.equal(greedy(twin), greedy(model))


def test_peft_models():
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model("llama"), lora)
    merged = copy.deepcopy(model).merge_and_unload()
    ids, mask = ragged_prompts()
    with attach(merged, PAPER):
        expected = greedy(merged)
        forced = merged(input_ids=ids, attention_mask=mask, prompt_length=3).logits
    plain = greedy(model)
    with attach(model, PAPER):
        assert torch.equal(greedy(model), expected)
        own = model(input_ids=ids, attention_mask=mask, prompt_length=3).logits
        assert torch.allclose(own, forced, atol=1e-5)
    assert torch.equal(greedy(model), plain)
    prompt = get_peft_model(tiny_model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(skipdecode.SkipDecodeError, match="prompt learning"):
        attach(prompt, PAPER)


def test_attach_warns_once_where_the_weights_were_not_tuned_under_the_schedule(tmp_path: Path):
    tuned, deeper = Schedule.from_speedup(LAYERS, 2, 16), Schedule.from_speedup(LAYERS, 3, 16)
    model = tiny_model("llama")
    with pytest.warns(UntunedScheduleWarning) as told, attach(model, tuned):
        pass
    assert len(told) == 1
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with attach(model, Schedule.full(LAYERS)):
            pass
        with attach(model.train(), tuned):
            pass
        model.eval().config.skipdecode = tuned.to_dict()
        for fine in (None, tuned, Schedule.from_speedup(LAYERS, 1.5, 16)):
            with attach(model, fine):
                pass
    with pytest.warns(UntunedScheduleWarning), attach(model, deeper):
        pass


def test_a_loaded_model_knows_all_schedules_that_it_was_tuned_under(tmp_path: Path):
    tuned, deeper = Schedule.from_speedup(LAYERS, 2, 16), Schedule.from_speedup(LAYERS, 3, 16)
    save_checkpoint(tmp_path, tuned.to_dict())
    options = {"curriculum": "sampled", "sampled_speedups": [2.0, 3.0]}
    (tmp_path / "recipe.json").write_text(json.dumps({"options": options, "schedule": tuned.to_dict()}))
    model = load_model(str(tmp_path)).model
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedScheduleWarning)
        with attach(model, deeper):
            pass
    with pytest.warns(UntunedScheduleWarning), attach(model, Schedule.from_speedup(LAYERS, 4, 16)):
        pass
