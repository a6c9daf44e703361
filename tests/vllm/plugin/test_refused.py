"""What the plugin changes in an engine's config, what it leaves alone, and what it refuses, in one line."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines import paper, save_tiny
from skipdecode import Schedule
from skipdecode.errors import RefusedEngineError, UnsupportedFeatureError
from tiny import LAYERS

WORKER = "skipdecode.vllm.runner.SkipWorker"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    save_tiny(folder, paper())
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_tiny(folder, None)
    return folder


def config_of(folder: Path, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    settings = {"dtype": "float32", "max_model_len": 128, "block_size": 32, "skip_tokenizer_init": True}
    return EngineArgs(str(folder), **(settings | options)).create_engine_config()


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(RefusedEngineError) as caught:
        config_of(folder, **options)
    text = str(caught.value)
    assert text.startswith("skipdecode: ")
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("name", "options", "skips"),
    [
        ("tuned", {}, True),
        ("plain", {}, False),
        ("plain", {"hf_overrides": {"skipdecode": paper().to_dict()}}, True),
        ("tuned", {"hf_overrides": {"skipdecode": None}}, False),
        ("plain", {"hf_overrides": {"skipdecode": Schedule.full(LAYERS).to_dict()}}, False),
    ],
)
def test_layers_are_skipped_by_config(request: pytest.FixtureRequest, name: str, options: dict[str, Any], skips: bool):
    config = config_of(request.getfixturevalue(name), **options)
    assert config.parallel_config.worker_cls == (WORKER if skips else "vllm.v1.worker.cpu_worker.CPUWorker")
    scheduler = "skipdecode.vllm.scheduler.SkipScheduler" if skips else None
    assert config.scheduler_config.scheduler_cls == scheduler
    assert skips or config.additional_config == {}
    assert not config.model_config.enforce_eager


@pytest.mark.parametrize(
    ("schedule", "part"),
    [
        (Schedule.constant(LAYERS + 2, 4).to_dict(), "is for 10 layers, but the model has 8"),
        ({"num_layers": 8, "drop_order": []}, "'budgets' is missing"),
    ],
)
def test_a_wrong_schedule(plain: Path, schedule: dict[str, Any], part: str):
    assert part in refusal(plain, hf_overrides={"skipdecode": schedule})


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"mode": "nested"}, "unknown option 'mode'"),
        ({"policy": "fifo"}, "give one of continuous, refill"),
        ({"refill_below": 2}, "refill_below=2 is not accepted"),
        ({"schedules": [paper().to_dict()]}, "'skipdecode' is given twice"),
    ],
)
def test_options(tuned: Path, options: dict[str, Any], part: str):
    assert part in refusal(tuned, additional_config={"skipdecode": options})


@pytest.mark.parametrize(
    ("kind", "schedule", "parts"),
    [
        ("olmo2", Schedule.split(LAYERS, 4, 4, name="halves"), ("'halves'", "Olmo2ForCausalLM")),
        ("bloom", paper(), ("BloomForCausalLM", "LlamaForCausalLM")),
        ("lfm2", paper(), ("other tokens than transformers at full depth", "LlamaForCausalLM")),
    ],
)
def test_other_architectures(tmp_path: Path, kind: str, schedule: Schedule, parts: tuple[str, ...]):
    save_tiny(tmp_path, schedule, kind)
    text = refusal(tmp_path)
    assert all(part in text for part in parts)


@pytest.mark.parametrize("version", ["0.26.1", "0.33.0"])
def test_a_version_of_vllm_that_is_not_supported(tuned: Path, plain: Path, version: str, monkeypatch: Any):
    monkeypatch.setattr("vllm.__version__", version)
    assert f"vLLM {version} is not supported: install one from 0.27 up to before 0.33" in refusal(tuned)
    assert config_of(plain).scheduler_config.scheduler_cls is None


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "--worker-cls"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "--scheduler-cls"),
        ({"runner": "pooling"}, "a pooling model"),
    ],
)
def test_flags_that_would_give_wrong_text(tuned: Path, options: dict[str, Any], part: str):
    text = refusal(tuned, **options)
    assert part in text
    assert text.endswith("does not work with skipped layers: start vLLM without it")


def test_a_kv_connector(tuned: Path):
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    assert "--kv-transfer-config" in refusal(tuned, kv_transfer_config=connector)


def test_drafts_of_another_model(tuned: Path, plain: Path):
    drafts = {"method": "draft_model", "model": str(plain), "num_speculative_tokens": 2}
    assert "speculative decoding other than ngram" in refusal(tuned, speculative_config=drafts)


def test_the_environment_of_another_engine_stays(tuned: Path, plain: Path):
    config_of(tuned)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    config_of(plain)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ


def test_backends_that_plan_into_memory_in_use_are_refused():
    from skipdecode.vllm.runner import StepMetadata

    def groups(kind: str) -> Any:
        builder = type(kind, (), {"build": lambda *_: None, "supports_update_block_table": True})()
        return [[SimpleNamespace(layer_names=["a"], metadata_builders=[builder])]]

    known = groups("FlashAttentionMetadataBuilder")
    StepMetadata(known, {0: ["a"]})
    assert not known[0][0].metadata_builders[0].supports_update_block_table
    with pytest.raises(UnsupportedFeatureError, match="FlashInferMetadataBuilder does not work with skipped layers"):
        StepMetadata(groups("FlashInferMetadataBuilder"), {0: ["a"]})
