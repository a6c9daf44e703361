"""Model cards, and what is pushed to a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

import skipdecode
from checkpoints import IDS, logits, save_adapter, save_checkpoint
from fits import random_fit
from hub_server import COMMIT, hub_of, use_hub
from skipdecode import LLM, Schedule
from skipdecode.cli import main
from skipdecode.errors import ModelLoadError, UsageError, WriteError
from skipdecode.models.fit import fit_of, set_fit
from skipdecode.models.loading.card import write_card
from skipdecode.models.loading.checkpoint import open_checkpoint
from skipdecode.models.loading.export import possible_formats
from skipdecode.models.loading.hub import load_model
from skipdecode.models.loading.saving import save_tuned
from tiny import LAYERS

SCHEDULE = Schedule(LAYERS, (5, 2, 4, 3, 1), (7, 5), prompt=(0, 1, 2), name="half")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hub with a base model and its card; the directory of what is pushed to it."""
    save_checkpoint(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n# Base\n")
    (new := tmp_path / "pushed").mkdir()
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with hub_of({"owner/base": tmp_path / "base"}, new) as address:
        use_hub(address, tmp_path, monkeypatch)
        yield new


def tuned(base: str, out: Path, *, adapter: bool = True) -> Path:
    loaded = load_model(base, device="cpu")
    model = save_adapter(out.parent / "made", base) if adapter else loaded.model
    set_fit(model, random_fit(loaded.model, [(0, 1, 2)]))
    save_tuned(model, loaded.tokenizer, SCHEDULE, out, base_name=base)
    write_card(out, loaded.checkpoint, SCHEDULE, "tune")
    return out


@pytest.mark.parametrize("adapter", [True, False])
def test_a_pushed_model_needs_nothing_else(hub: Path, tmp_path: Path, capsys: Any, adapter: bool) -> None:
    here = tuned("owner/base@main", tmp_path / "tuned", adapter=adapter)
    (here / "self.jsonl").write_text("{}")
    assert skipdecode.push_to_hub(here, "owner/fast").endswith("/owner/fast")
    assert '"private"' in (hub / "asked.json").read_text()
    assert not (hub / "fast" / "self.jsonl").exists()
    card = ModelCard.load(hub / "fast" / "README.md")
    assert card.data.base_model == "owner/base"
    assert (card.data.license, card.data.language) == ("apache-2.0", "en")
    assert card.data.library_name == ("peft" if adapter else "transformers")
    assert "skipdecode serve owner/fast" in card.text
    assert "| new tokens from position 1 on | 5 | 0, 1, 3, 6, 7 |" in card.text
    found = LLM("owner/fast@main", device="cpu")
    assert (found.schedule_of(None), fit_of(found.loaded.model) is not None) == (SCHEDULE, True)
    assert found.generate("red", 8)[0].tokens == LLM(here, device="cpu").generate("red", 8)[0].tokens
    command = ["generate", "owner/fast", "red", "--max-new-tokens", "4", "--revision"]
    assert [main([*command, revision]) for revision in ("main", "absent")] == [0, 2]
    # Without the package, as the card says: at full depth.
    full = logits(load_model("owner/fast", device="cpu").model)
    assert torch.equal(AutoModelForCausalLM.from_pretrained("owner/fast")(IDS).logits, full)
    with pytest.raises(ModelLoadError, match="revision"):
        load_model("owner/fast@absent")
    assert load_model(f"owner/base@{COMMIT}", device="cpu").checkpoint.own_folder.name == COMMIT


def test_the_command_line_exports_and_pushes(hub: Path, tmp_path: Path, capsys: Any) -> None:
    here, out = tuned("owner/base", tmp_path / "tuned"), tmp_path / "out"
    command = ["export", str(here), "--format", "merged", "--out", str(out), "--push-to-hub", "me/merged"]
    assert main(command) == 0
    pushed = LLM("me/merged", device="cpu")
    assert pushed.loaded.checkpoint.adapter is None
    assert pushed.schedule_of(None) == SCHEDULE
    assert pushed.generate("red", 8)[0].tokens == LLM(here, device="cpu").generate("red", 8)[0].tokens
    assert "skipdecode export tuned --format merged --out out" in (hub / "merged" / "README.md").read_text()


@pytest.mark.parametrize("adapter", [True, False])
def test_a_schedule_whose_prompts_alone_skip_is_described_as_it_is(tmp_path: Path, adapter: bool, capsys: Any) -> None:
    save_checkpoint(tmp_path / "base")
    here = tuned(str(tmp_path / "base"), tmp_path / "tuned", adapter=adapter)
    schedule = Schedule(LAYERS, (), (LAYERS,), prompt=(0, 1, 2, 3), name="short")
    write_card(here, open_checkpoint(str(tmp_path / "base")), schedule, "tune")
    text = (here / "README.md").read_text()
    assert "prompts run fewer layers, and new tokens all of them" in text
    assert "new tokens run fewer" not in text
    schedule.save(tmp_path / "short.json")
    # As no layer can be left out, export takes the format that keeps them all; a named format is not replaced.
    command = ["export", str(here), "--schedule", str(tmp_path / "short.json"), "--out"]
    assert main([*command, str(tmp_path / "hf"), "--format", "hf"]) == 2
    assert main([*command, str(tmp_path / "out")]) == 0
    assert "format merged" in capsys.readouterr().err
    assert open_checkpoint(str(tmp_path / "out")).schedule == schedule
    assert possible_formats(str(here), str(tmp_path / "short.json")) == ["merged"]
    assert possible_formats(str(here), "full") == ["hf", "merged", "gguf"]


def test_what_nobody_could_load_or_write_is_refused(hub: Path, tmp_path: Path, monkeypatch: Any) -> None:
    here = tuned(str(tmp_path / "base"), tmp_path / "tuned")
    with pytest.raises(UsageError, match="merge"):
        skipdecode.push_to_hub(here, "owner/fast")
    with pytest.raises(UsageError, match="no model"):
        skipdecode.push_to_hub(tmp_path, "owner/fast")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(WriteError, match="hf auth login"):
        skipdecode.push_to_hub(tmp_path / "base", "owner/fast")


def test_a_card_that_somebody_changed_is_kept(hub: Path, tmp_path: Path, capsys: Any) -> None:
    here, ref = tuned("owner/base", tmp_path / "tuned", adapter=False), open_checkpoint("owner/base")
    card = here / "README.md"
    write_card(here, ref, Schedule.full(LAYERS), "tune")
    assert "`half`" not in card.read_text()
    card.write_text(mine := card.read_text().replace("## Use", "## Use it"))
    write_card(here, ref, SCHEDULE, "tune")
    assert card.read_text() == mine
    assert "README.md is kept" in capsys.readouterr().err
