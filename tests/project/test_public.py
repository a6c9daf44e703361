"""What `import skipdecode` gives: the public names, quickly; models and adapters by name; schedules as files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import skipdecode
from checkpoints import save_adapter, save_checkpoint
from skipdecode import Schedule
from skipdecode.errors import ModelLoadError, OutputError, ScheduleError
from skipdecode.models.loading.checkpoint import open_checkpoint
from tiny import LAYERS, tiny_model

SCHEDULE = Schedule.from_speedup(LAYERS, 2, 8)


def test_dir_shows_the_public_names_and_no_others():
    __import__("skipdecode.cli.generate")  # a submodule that is loaded is an attribute, too
    assert dir(skipdecode) == sorted(skipdecode.__all__)
    assert all(getattr(skipdecode, name) is not None for name in skipdecode.__all__)
    with pytest.raises(AttributeError):
        skipdecode.absent  # noqa: B018


@pytest.mark.parametrize(
    ("modules", "unneeded"),
    [
        ("skipdecode.schedule, skipdecode.cli.plan", ["torch", "transformers", "matplotlib"]),
        # Modelling code takes as long as torch twice over, and the fast engine does without it.
        ("skipdecode.learning.prepare, skipdecode.serving.service", ["transformers.modeling_utils"]),
    ],
)
def test_what_is_not_needed_is_not_imported(modules: str, unneeded: list[str]):
    code = f"import sys, skipdecode, {modules}; dir(skipdecode); print([n for n in {unneeded} if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_what_cannot_be_loaded_or_saved_names_the_file(tmp_path: Path):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    for name in ("broken.json", "bytes.json", "absent.json"):
        with pytest.raises(ScheduleError, match=name):
            Schedule.load(tmp_path / name)
    with pytest.raises(OutputError, match="absent"):
        SCHEDULE.save("/dev/null/absent.json")


def test_the_bundled_adapter_has_a_name_that_works_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("e2e-smollm2-135m").mkdir()
    found = open_checkpoint("e2e-smollm2-135m")
    assert (found.base, found.schedule.num_layers) == ("smollm2-135m", 30)
    with pytest.raises(ModelLoadError):  # the directory of that name is ./name
        skipdecode.load("./e2e-smollm2-135m")


def test_attach_finds_an_adapters_schedule_however_it_was_loaded(tmp_path: Path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from skipdecode.models.loading.saving import save_tuned

    base, adapter = str(tmp_path / "base"), tmp_path / "adapter"
    save_checkpoint(tmp_path / "base", Schedule.constant(LAYERS, 4).to_dict())
    save_tuned(save_adapter(tmp_path / "made", base), None, SCHEDULE, adapter, base_name=base)
    plain = AutoModelForCausalLM.from_pretrained
    for model in (
        skipdecode.load(str(adapter), device="cpu").model,
        peft.PeftModel.from_pretrained(plain(base), str(adapter)),
        peft.AutoPeftModelForCausalLM.from_pretrained(str(adapter)),
        plain(str(adapter)),
    ):
        with skipdecode.attach(model) as attachment:
            assert attachment.schedule == SCHEDULE
    with skipdecode.attach(plain(base)) as attachment:
        assert attachment.schedule == Schedule.constant(LAYERS, 4)


def test_a_model_without_a_schedule_says_how_to_get_one(tmp_path: Path):
    with pytest.raises(ScheduleError, match=r"Schedule\.load\(FILE\)"):
        skipdecode.attach(tiny_model("llama"))
    with pytest.raises(ScheduleError, match="neither the adapter nor its base"):
        skipdecode.attach(save_adapter(tmp_path, "base"))
