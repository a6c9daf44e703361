"""The type that a model is loaded in, by the measured products of the engine that will run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import skipdecode
from checkpoints import save_adapter, save_checkpoint
from skipdecode.models.loading import smollm2
from skipdecode.models.loading.ref import ModelRef
from skipdecode.models.loading.store import add_model
from skipdecode.performance.cost_source import find_geometry
from skipdecode.performance.machine import measure_machine


@pytest.fixture(autouse=True)
def products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the remembered rates."""
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "products"


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """A checkpoint in bf16."""
    save_checkpoint(tmp_path / "stored", dtype=torch.bfloat16)
    return str(tmp_path / "stored")


def dtype_of(name: str, **options: str) -> torch.dtype:
    return skipdecode.load(name, device="cpu", **options).model.dtype


def remember(products: Path, fp32: float) -> None:
    """Replace what was measured: the rate of fp32 over that of bf16."""
    for file in products.iterdir():
        kept = json.loads(file.read_text())
        file.write_text(json.dumps(kept | {"found": {"bfloat16": 1e9, "float32": fp32 * 1e9}}))


@pytest.mark.parametrize(("fp32", "dtype"), [(1.4, torch.bfloat16), (1.6, torch.float32)])
def test_auto_is_fp32_where_its_products_are_clearly_faster(
    tmp_path: Path, products: Path, stored: str, fp32: float, dtype: torch.dtype
) -> None:
    dtype_of(stored)
    remember(products, fp32)
    add_model(smollm2.NAME, lambda folder: save_checkpoint(folder) and "test")
    save_adapter(tmp_path / "adapter", smollm2.NAME)
    for name in (smollm2.NAME, str(tmp_path / "adapter"), stored):
        assert dtype_of(name) == skipdecode.LLM(name, device="cpu").loaded.model.dtype == dtype
        assert dtype_of(name, dtype="float32") == torch.float32
        assert dtype_of(name, dtype="bfloat16") == torch.bfloat16
    # So it is for whole weights that were tuned in bf16, which are stored in fp32, and for adapters on them.
    results = {
        "bf16": {"precision": "bf16"},
        "fp32": {"precision": "fp32"},
        "unfinished": None,
        "merged": {"precision": "bf16"},
    }
    for folder, result in results.items():
        save_checkpoint(tmp_path / folder)
        recipe = {"options": {"full": folder != "merged"}, "result": result}
        (tmp_path / folder / "recipe.json").write_text(json.dumps(recipe))
        assert dtype_of(str(tmp_path / folder)) == (dtype if folder == "bf16" else torch.float32)
    save_adapter(tmp_path / "on-tuned", str(tmp_path / "bf16"))
    assert dtype_of(str(tmp_path / "on-tuned")) == dtype
    for name in (smollm2.NAME, str(tmp_path / "bf16"), stored):
        geometry, planned = find_geometry(ModelRef(name), "auto", torch.device("cpu"))
        assert (planned, geometry.dtype_bytes) == (dtype, dtype.itemsize)
    assert len(list(products.iterdir())) == 1
    assert measure_machine("cpu", torch.bfloat16).flops == 1e9
    assert measure_machine("cpu", torch.float32).flops == fp32 * 1e9


def test_each_engine_has_rates_of_its_own(products: Path, stored: str) -> None:
    dtype_of(stored, engine="transformers")
    remember(products, 2)
    kept = set(products.iterdir())
    dtype_of(stored, engine="fast")
    (fast,) = set(products.iterdir()) - kept
    assert json.loads(fast.read_text())["found"]["bfloat16"] != 1e9
    assert dtype_of(stored, engine="transformers") == torch.float32
    save_checkpoint(Path(stored), dtype=torch.float16)
    assert dtype_of(stored, engine="transformers") == torch.float16


@pytest.mark.parametrize("content", ["", '{"key": ', "[]", '{"key": 0, "found": {}}'])
def test_damaged_rates_are_measured_again(products: Path, stored: str, content: str) -> None:
    dtype = dtype_of(stored)
    (file,) = products.iterdir()
    kept = json.loads(file.read_text())
    file.write_text(content)
    assert dtype_of(stored) == dtype
    again = json.loads(file.read_text())
    assert again["key"] == kept["key"]
    assert again["found"].keys() == kept["found"].keys() == {"bfloat16", "float32"}


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "file"))
    assert dtype_of(stored) in (torch.bfloat16, torch.float32)
