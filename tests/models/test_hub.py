"""Models by name: directories, adapters, hub ids, multimodal checkpoints, and what every wrong name or file says."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForMaskedLM,
    T5Config,
)

import skipdecode
from checkpoints import byte_tokenizer, edit_json, logits, save_adapter, save_checkpoint
from hub_server import COMMIT, hub_of, use_hub
from skipdecode import Schedule
from skipdecode.errors import ModelLoadError, ScheduleError
from skipdecode.models.loading import smollm2
from skipdecode.models.loading.checkpoint import open_checkpoint
from skipdecode.models.loading.gguf_file import write_gguf
from skipdecode.models.loading.hub import load_model
from skipdecode.models.loading.store import add_model
from skipdecode.models.loading.weights_sample import base_entry
from tiny import LATER, LAYERS, OPTIONS, tiny_model

pytestmark = pytest.mark.usefixtures("own_cache")
SCHEDULE = Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=6, seq_len=8)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "model")
    return tmp_path / "model"


# ---------------------------------------------------------------------- directories


def test_a_directory_gives_the_same_model_and_a_tokenizer_ready_for_batches(checkpoint: Path) -> None:
    loaded = load_model(str(checkpoint), device="cpu")
    assert torch.equal(logits(loaded.model), logits(tiny_model("llama")))
    assert not loaded.model.training
    found = loaded.checkpoint
    assert (found.name, found.own_folder, found.schedule) == (str(checkpoint), checkpoint, None)
    batch = loaded.tokenizer(["red", "red green blue"], padding=True)
    assert batch["input_ids"] == [[2, 2, 4], [4, 5, 6]]
    assert batch["attention_mask"] == [[0, 0, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("carried", "message"),
    [
        (Schedule.constant(LAYERS + 1, 4).to_dict(), f"is for {LAYERS + 1} layers, but the model has {LAYERS}"),
        (SCHEDULE.to_dict() | {"budgets": [3, 4]}, "config.json: budgets are not nested"),
        ([1, 2], "config.json: a schedule is a JSON object"),
    ],
)
def test_a_wrong_carried_schedule_is_refused_with_its_place(tmp_path: Path, carried: Any, message: str) -> None:
    save_checkpoint(tmp_path / "model", carried)
    with pytest.raises(ScheduleError, match=message):
        load_model(str(tmp_path / "model"))


def test_what_is_done_to_a_config_changes_no_load(checkpoint: Path) -> None:
    ref = open_checkpoint(str(checkpoint))
    ref.config.dtype = torch.bfloat16  # as building a model on the meta device does
    assert load_model(ref, device="cpu").model.dtype == torch.float32


def test_a_model_without_tokenizer_is_an_error_unless_none_is_needed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", tokenizer=False)
    with pytest.raises(ModelLoadError, match=r"has no tokenizer: put a tokenizer\.json"):
        load_model(str(tmp_path / "model"))
    assert load_model(str(tmp_path / "model"), require_tokenizer=False).tokenizer is None
    (tmp_path / "model" / "tokenizer.json").write_text("{")  # which is no absent one
    with pytest.raises(ModelLoadError, match="its tokenizer does not load"):
        load_model(str(tmp_path / "model"), require_tokenizer=False)


def changed_weights(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = checkpoint / "model.safetensors"
    save_file({n: t.clone() for n, t in change(load_file(file)).items()}, file, metadata={"format": "pt"})


UP, UPPER = "model.layers.4.mlp.up_proj.weight", "model.layers.4.mlp.upper.weight"
ROW = torch.tensor([1])


def test_a_pickled_checkpoint_is_checked_alike(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    torch.save(weights, checkpoint / "pytorch_model.bin")
    assert torch.equal(logits(load_model(str(checkpoint), device="cpu").model), logits(tiny_model("llama")))
    torch.save(weights | {UP: weights[UP].to(torch.int8)}, checkpoint / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=UP):
        load_model(str(checkpoint))


def test_every_part_of_a_checkpoint_is_checked(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    part = tmp_path / index["weight_map"][UP]
    assert len(set(index["weight_map"].values())) > 2
    assert torch.equal(logits(load_model(str(tmp_path), require_tokenizer=False).model), logits(tiny_model("llama")))
    weights = load_file(part)
    save_file(weights | {UP: weights[UP].to(torch.int8)}, part, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=UP):
        load_model(str(tmp_path), require_tokenizer=False)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"index\.json has no weight_map"):
        load_model(str(tmp_path), require_tokenizer=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_matrix_of_another_float_is_a_weight(checkpoint: Path, dtype: torch.dtype) -> None:
    changed_weights(checkpoint, lambda weights: weights | {UP: weights[UP].to(dtype)})
    torch.testing.assert_close(
        logits(load_model(str(checkpoint)).model), logits(tiny_model("llama")), atol=0.1, rtol=0.1
    )


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {"num_hidden_layers": 10**9}),
        ("qwen2", {"num_hidden_layers": 10**9}),  # its config lists the layers
        ("llama", {"num_hidden_layers": 9000}),
        ("llama", {"vocab_size": 10**9}),
        ("gpt2", {"n_positions": 10**9}),
    ],
    ids=str,
)
def test_a_config_beyond_the_weights_fills_no_memory(tmp_path: Path, family: str, values: dict[str, int]) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **values)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelLoadError, match="its config") as caught:
        load_model(str(tmp_path), require_tokenizer=False)
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


@pytest.mark.parametrize("value", [[], None], ids=str)
def test_a_config_needs_no_classes_and_no_names_of_outputs(checkpoint: Path, value: Any) -> None:
    edit_json(checkpoint / "config.json", architectures=value, return_dict=False)
    assert logits(load_model(str(checkpoint)).model).isfinite().all()


def behind(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Another layer's weights, behind the last."""
    last, next_one = f"layers.{LAYERS - 1}.", f"layers.{LAYERS}."
    return {name.replace(last, next_one): tensor for name, tensor in weights.items() if last in name}


MASK = torch.ones(1, 1, 4, 4, dtype=torch.bool)
MASKS = {"transformer.h.0.attn.bias": MASK, "transformer.h.0.attn.masked_bias": torch.ones(())}  # of old checkpoints
EXTRA: list[tuple[str, dict[str, Any], Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]]] = [
    ("llama", {}, lambda w: {"v_head.summary.weight": torch.ones(1, 32), "v_head.summary.bias": torch.ones(1)}),
    ("llama", {}, lambda w: behind(w) | {f"model.layers.{LAYERS}.eh_proj.weight": torch.ones(32, 64)}),
    ("llama", {"num_nextn_predict_layers": 1}, behind),
    ("llama", {}, lambda w: {"mtp.layers.0.mlp.up_proj.weight": torch.ones(3, 3)}),
    ("gptj", {}, lambda w: MASKS),
    ("codegen", {}, lambda w: {"transformer.h.0.attn.causal_mask": MASK}),
]


@pytest.mark.parametrize(("family", "config", "extra"), EXTRA)
def test_unused_tensors_are_told(tmp_path: Path, family: str, config: dict[str, Any], extra: Any, capsys: Any) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **config)
    added: list[str] = []

    def with_extra(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        added.extend(more := extra(weights))
        return weights | more

    changed_weights(tmp_path, with_extra)
    loaded = load_model(str(tmp_path), require_tokenizer=False, device="cpu")
    assert torch.equal(logits(loaded.model), logits(model))
    lines = [line for line in capsys.readouterr().err.splitlines() if min(added) in line]
    if getattr(model, "_keys_to_ignore_on_load_unexpected", None):  # transformers 5.24 leaves these masks out itself
        assert lines == []
    else:
        (line,) = lines
        assert f"{len(added)} tensors" in line


def test_masks_of_old_checkpoints_of_gpt2_are_left_out(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    model.save_pretrained(tmp_path)
    changed_weights(tmp_path, lambda weights: weights | MASKS)
    assert torch.equal(logits(load_model(str(tmp_path), require_tokenizer=False, device="cpu").model), logits(model))


POINTER = "version https://git-lfs/spec/v1\noid sha256:" + "0" * 64 + "\nsize 9\n"


def of_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: changed_weights(folder, lambda weights: weights | {UP: change(weights[UP])})


def of_type(dtype: torch.dtype) -> Callable[[Path], None]:
    return of_weight(lambda weight: weight.to(dtype))


def of_config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **values)


def as_text(file: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(content)


def in_fp8(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    of_type(torch.float8_e4m3fn)(folder)


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: changed_weights(folder, lambda weights: {n.replace(old, new): t for n, t in weights.items()})


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "int8": (of_type(torch.int8), f"type I8 .*{UP}"),
    "fp8 that a config names": (in_fp8, f"type F8_E4M3 .*{UP}"),
    "classes in a list of numbers": (of_config(architectures=[5]), "architectures"),
    "another prefix": (
        lambda folder: changed_weights(folder, lambda weights: {f"student.{n}": t for n, t in weights.items()}),
        r"begin with 'student\.'",
    ),
    "fewer layers than the weights": (
        of_config(num_hidden_layers=6),
        "18 weights are not in the model, such as model.layers.6.input_layernorm.weight",
    ),
    "another name": (
        renamed(UP, UPPER), f"1 weights are missing, such as {UP}; 1 weights are not in the model, such as {UPPER}"
    ),
    "another shape": (
        of_weight(lambda weight: weight[:47]),
        rf"have another shape, such as {UP} \(\(47, 32\) in the file, \(48, 32\) in",
    ),
    "NaN": (of_weight(lambda weight: weight.index_fill(0, ROW, float("nan"))), f"1 weights are not finite.* {UP}"),
    "a layer behind the last": (
        lambda folder: changed_weights(folder, lambda weights: weights | behind(weights)), f"model.layers.{LAYERS}"
    ),
    "a pointer for weights": (as_text("model.safetensors", POINTER), "model.safetensors is a git-lfs .*git lfs pull"),
    "a pointer for a tokenizer": (as_text("tokenizer.json", POINTER), "tokenizer.json is a git-lfs .*git lfs pull"),
    "a pointer for a config": (as_text("config.json", POINTER), "config.json is a git-lfs pointer.*git lfs pull"),
    "gptq": (
        of_config(quantization_config={"quant_method": "gptq", "bits": 4}), r"gptq.*dequantize.*quantization int8"
    ),
    "a file that ends early": (cut_off, "its weights do not load"),
    "no JSON": (as_text("config.json", "{"), "its config does not load"),
    "an unknown type": (as_text("config.json", '{"model_type": "no-such-family"}'), "its config does not load"),
    "a width in words": (of_config(hidden_size="x"), "its config does not load"),
    "an end in words": (as_text("generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id .* is 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_one_line_that_names_the_fault(checkpoint: Path, case: str) -> None:
    change, said = BROKEN[case]
    change(checkpoint)
    with pytest.raises(ModelLoadError, match=said) as caught:
        load_model(str(checkpoint))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "prefix"), [("llama", "_orig_mod."), ("gpt2", "module."), ("mixtral", "module._orig_mod.")]
)
def test_names_of_wrappers_are_left_out(tmp_path: Path, family: str, prefix: str, capsys: Any) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    changed_weights(tmp_path, lambda weights: {prefix + name: tensor for name, tensor in weights.items()})
    loaded = load_model(str(tmp_path), require_tokenizer=False, device="cpu")
    assert torch.equal(logits(loaded.model), logits(model))
    assert "_orig_mod" in capsys.readouterr().err
    loaded.model.save_pretrained(tmp_path / "again")
    assert not any(prefix in name for name in load_file(tmp_path / "again" / "model.safetensors"))
    assert torch.equal(logits(load_model(str(tmp_path / "again"), require_tokenizer=False).model), logits(model))


def test_large_weights_of_half_precision_are_finite(tmp_path: Path) -> None:
    model = tiny_model("llama").to(torch.float16)
    model.lm_head.weight.data.fill_(60000)  # the sum is beyond float16
    model.save_pretrained(tmp_path)
    assert load_model(str(tmp_path), require_tokenizer=False).checkpoint.num_layers == LAYERS


def test_only_decoders_with_a_language_model_head_are_accepted(tmp_path: Path) -> None:
    bert = BertConfig(hidden_size=12, num_hidden_layers=1, vocab_size=9)
    t5 = T5Config(d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1, vocab_size=9)
    refused = {
        "encoder-decoder": AutoModelForSeq2SeqLM.from_config(t5),
        "BertForMaskedLM": BertForMaskedLM(bert),
        "LlamaModel": AutoModel.from_config(tiny_model("llama").config),
    }
    for said, model in refused.items():
        model.save_pretrained(tmp_path / said)
        with pytest.raises(ModelLoadError, match=f"{said}.*a decoder-only causal language model is needed"):
            load_model(str(tmp_path / said))


# ---------------------------------------------------------------------- wrong requests


def test_unknown_names_list_what_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "file.bin").touch()
    for name, said in [
        ("", "there is no such directory"),
        ("no/such/directory", "there is no such directory"),
        (str(tmp_path / "file.bin"), "is a file"),
        ("owner/name", "offline mode is on"),
    ]:
        with pytest.raises(ModelLoadError, match=f"{said}.*accepted are a local directory, .*smollm2-135m"):
            load_model(name)


def test_a_directory_without_a_model_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"a config\.json or an adapter_config\.json is needed"):
        load_model(str(tmp_path))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"give the file .*model\.gguf"):
        load_model(str(tmp_path))


# ---------------------------------------------------------------------- adapters


def test_an_adapter_of_the_embedded_model_finds_it_by_name(tmp_path: Path) -> None:
    add_model(smollm2.NAME, lambda folder: save_checkpoint(folder, SCHEDULE.to_dict()) and "test")
    tuned = save_adapter(tmp_path / "adapter", smollm2.NAME)
    loaded = load_model(str(tmp_path / "adapter"), dtype="float32", device="cpu")
    torch.testing.assert_close(logits(loaded.model), logits(tuned))
    assert loaded.checkpoint.schedule == SCHEDULE


def test_an_adapter_whose_tensors_do_not_fit_is_refused_by_name(tmp_path: Path, checkpoint: Path) -> None:
    save_adapter(tmp_path / "adapter", str(checkpoint))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    name = "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"

    def refused(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, file)
        with pytest.raises(ModelLoadError) as caught:
            load_model(str(tmp_path / "adapter"))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "1 weights are missing, such as" in refused({key: w for key, w in weights.items() if key != name})
    said = refused({key.replace("q_proj", "query"): w for key, w in weights.items()})
    assert f"{2 * LAYERS} weights are missing" in said
    assert f"{2 * LAYERS} weights are not in the model, such as base_model.model.model.layers.0.self_attn.query" in said
    assert "layers.3.self_attn.q_proj.lora_A" in refused(weights | {name: weights[name][:, :3].clone()})
    assert f"1 weights are not finite, such as {name}" in refused(weights | {name: weights[name] * float("nan")})
    said = refused(weights | {name: weights[name].to(torch.int8)})
    assert "I8" in said
    assert name in said
    file.write_text(POINTER)
    with pytest.raises(ModelLoadError, match=f"{file.name} is a git-lfs pointer"):
        load_model(str(tmp_path / "adapter"))
    file.unlink()
    with pytest.raises(ModelLoadError, match=r"has no adapter_model\.safetensors"):
        load_model(str(tmp_path / "adapter"))


def test_an_adapter_knows_the_weights_it_was_tuned_on(tmp_path: Path, checkpoint: Path, capsys: Any) -> None:
    save_adapter(tmp_path / "adapter", str(checkpoint))
    base = load_model(str(checkpoint), device="cpu")
    recipe = {"options": {}, "base": base_entry(base.model, base.checkpoint.folder) | {"source": "the shop"}}
    (tmp_path / "adapter" / "recipe.json").write_text(json.dumps(recipe))

    def said(change: float, dtype: str = "auto") -> str:
        """What is told when the base's weights are off by noise of this share of their size."""
        torch.manual_seed(0)
        weights = {k: w + change * w.std() * torch.randn_like(w) for k, w in kept.items()}
        save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
        load_model(str(tmp_path / "adapter"), dtype=dtype, device="cpu")
        return capsys.readouterr().err

    kept = load_file(checkpoint / "model.safetensors")
    capsys.readouterr()
    for dtype in ("float32", "bfloat16", "float16"):
        assert "tuned on" not in said(0, dtype)
    assert "tuned on other bits" in said(0.08)
    with pytest.raises(ModelLoadError, match="the shop"):
        said(1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not the JSON object of a PEFT adapter"),
        ("[]", "is not the JSON object of a PEFT adapter"),
        ("{}", "names no base model"),
        ('{"base_model_name_or_path": "SELF"}', "is an adapter itself"),
        ('{"base_model_name_or_path": "/no/such/base"}', "model '/no/such/base' is not known"),
    ],
)
def test_a_broken_adapter_says_why(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "adapter_config.json").write_text(content.replace("SELF", str(tmp_path)))
    with pytest.raises(ModelLoadError, match=message):
        load_model(str(tmp_path))


# ---------------------------------------------------------------------- the hub


def test_hub_ids_stay_loadable(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with hub_of({"owner/tiny": checkpoint}) as address:
        use_hub(address, tmp_path, monkeypatch)
        loaded = load_model("owner/tiny", device="cpu")
        assert torch.equal(logits(loaded.model), logits(tiny_model("llama")))
        assert loaded.checkpoint.own_folder.name == COMMIT
        with pytest.raises(ModelLoadError, match=r"'owner/absent' is not known.*no such public model"):
            load_model("owner/absent")
        capsys.readouterr()
    for _ in range(2):
        again = load_model("owner/tiny", device="cpu")
        assert again.checkpoint.own_folder == loaded.checkpoint.own_folder
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "owner/tiny" in line]
    assert "cannot be reached" in told
    assert "local cache" in told


def test_every_kind_of_name_has_its_base(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, gguf = tiny_model("llama", vocab_size=320, hidden_size=64), tmp_path / "tiny.gguf"
    write_gguf(model, gguf, "f16", byte_tokenizer())
    for name, base in (("adapter", str(checkpoint)), ("pinned", "owner/tiny"), ("of-gguf", str(gguf))):
        save_adapter(tmp_path / name, base)
    edit_json(tmp_path / "pinned" / "adapter_config.json", revision=COMMIT)
    SCHEDULE.save(tmp_path / "adapter" / "skipdecode.json")
    hub, store = tmp_path / "hub-cache" / "models--owner--tiny" / "snapshots" / COMMIT, tmp_path / "cache" / "models"
    with hub_of({"owner/tiny": checkpoint}) as address:
        use_hub(address, tmp_path, monkeypatch)
        for name, adapter, base, folder, schedule in (
            (str(tmp_path / "adapter"), tmp_path / "adapter", str(checkpoint), checkpoint, SCHEDULE),
            ("owner/tiny", None, "owner/tiny", hub, None),
            (str(tmp_path / "pinned"), tmp_path / "pinned", f"owner/tiny@{COMMIT}", hub, None),
            (str(tmp_path / "of-gguf"), tmp_path / "of-gguf", str(gguf), store, None),
        ):
            found = open_checkpoint(name)
            assert (found.adapter, found.base, found.schedule, found.fit) == (adapter, base, schedule, None)
            assert found.num_layers == found.config.num_hidden_layers == LAYERS
            assert folder in (found.folder, found.folder.parent)


def test_a_silent_hub_is_told_and_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_hub(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, monkeypatch)
        with pytest.raises(
            ModelLoadError, match=r"neither a local directory nor in the hub's local cache.*cannot be reached"
        ):
            load_model("owner/tiny")
        with pytest.raises(ModelLoadError):
            load_model(open_checkpoint("owner/other"))
        silent.setblocking(False)
        silent.accept()
        with pytest.raises(BlockingIOError):
            silent.accept()  # asked once; the client by itself asks again and again


_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 28, "patch_size": 14}
_LLAMA4 = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "intermediate_size": 64}
KINDS = {
    "gemma3": ("gemma3_text", _VISION),
    "gemma4": ("gemma4_text", None),
    "llama4": ("llama4_text", _VISION | _LLAMA4),
    "mistral3": ("mistral", _VISION | {"head_dim": 8}),
    "qwen3_5": (
        "qwen3_5_text",
        {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    ),
}


@pytest.mark.parametrize("kind", [kind for kind, (text, _) in KINDS.items() if text in {*LATER, *OPTIONS}])
@torch.no_grad()
def test_a_multimodal_checkpoint_is_its_text_model(kind: str, tmp_path: Path) -> None:
    text, vision = KINDS[kind]
    words = ("vocab_size", *(["vocab_size_per_layer_input"] if kind == "gemma4" else []))
    text_config = tiny_model(text, **dict.fromkeys(words, 259)).config.to_dict()
    given = {"text_config": text_config} | ({} if vision is None else {"vision_config": vision})
    config = AutoConfig.for_model(kind, **given)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = skipdecode.load(tmp_path, dtype="float32")
    ids = torch.tensor([[5, 6, 7, 8]])
    reader = whole.language_model if kind == "llama4" else whole  # whose forward fails without images in 5.24
    torch.testing.assert_close(loaded.model(ids).logits, reader(input_ids=ids).logits, rtol=0, atol=1e-5)
    assert loaded.model.config.model_type == text
    assert skipdecode.LLM(loaded).generate(["ab"], schedule="1.5x", max_new_tokens=3)[0].tokens
