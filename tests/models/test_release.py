"""Releases of other packages: both names of the KV cache, and versions that were not tested."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from torch import Tensor, nn

from checkpoints import save_checkpoint
from skipdecode import Schedule, attach
from skipdecode.errors import UnsupportedFeatureError
from skipdecode.models.release import cache_name
from tiny import LAYERS, tiny_model

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
PAPER = Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=6, seq_len=8)
IDS = torch.arange(3, 15)[None]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a_cache_may_be_given_under_the_name_of_either_release(family: str):
    model = tiny_model(family)

    def logits(name: str) -> Tensor:
        with torch.no_grad(), attach(model, PAPER) as attachment:
            cache = attachment.new_cache(8)
            model(IDS[:, :8], **{name: cache})
            return torch.cat([model(IDS[:, n : n + 1], **{name: cache}).logits for n in range(8, 12)], 1)

    def text(name: str) -> list[int]:
        with attach(model, PAPER) as attachment:
            return model.generate(IDS, max_new_tokens=6, do_sample=False, **{name: attachment.new_cache()}).tolist()

    assert torch.equal(logits("cache"), logits("past_key_values"))
    assert text("cache") == text("past_key_values")


def test_a_cache_under_two_names_is_refused():
    model = tiny_model("llama")
    with attach(model, PAPER) as attachment:
        caches: dict[str, Any] = {name: attachment.new_cache() for name in ("cache", "past_key_values")}
        with pytest.raises(TypeError, match="give one"):
            model(IDS, **caches)
        with pytest.raises(TypeError, match="give one"):
            model.generate(IDS, max_new_tokens=2, **caches)


def test_a_layer_whose_cache_has_an_unknown_name_is_refused_in_one_sentence():
    class Later(nn.Module):
        def forward(self, hidden_states: Tensor, kv: Any = None) -> Tensor:
            return hidden_states

    with pytest.raises(UnsupportedFeatureError, match=r"Later\.forward takes no KV cache .* pip install 'transformers"):
        cache_name(Later.forward)


@pytest.mark.parametrize(("version", "said"), [("9.9.0", 1), ("5.17.0", 1), ("5.24.3", 0)])
def test_an_untested_version_is_one_sentence_that_says_what_to_install(tmp_path: Path, version: str, said: int):
    """Metadata of another version stands first on the path; the code is that of the installed one."""
    (tmp_path / f"transformers-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n"
    (tmp_path / f"transformers-{version}.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    save_checkpoint(tmp_path / "model")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "skipdecode", "generate", "model", "ab", "--max-new-tokens", "1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if f"transformers {version}" in line]
    assert len(lines) == said
    assert all(re.search(r"pip install 'transformers<[\d.]+,>=[\d.]+'", line) for line in lines)


@pytest.mark.parametrize("name", ["torch", "transformers", "tokenizers", "peft", "accelerate", "vllm"])
def test_ranges_end_below_a_release_and_hold_the_pinned_version(name: str):
    ranges = {each.name: each.specifier for each in map(Requirement, LINES)}
    assert any(part.operator == "<" for part in ranges[name])
    pinned = re.search(rf"^{name}==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert pinned is None or pinned[1] in ranges[name]
