"""A tiny model directory with a byte-level tokenizer, and the command line as a subprocess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny import tiny_model

CONTEXT = 96
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte, after pad, begin and end."""
    special = ["<pad>", "<s>", "</s>"]
    vocab = {t: i for i, t in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )
    fast.chat_template = CHAT_TEMPLATE if chat else None
    return fast


def save_tiny_model(path: Path, *, tokenizer: bool = True, chat: bool = True, context: int = CONTEXT) -> str:
    """A random Llama of 8 layers with the byte tokenizer; returns its directory as text."""
    model = tiny_model("llama", vocab_size=259, max_position_embeddings=context)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(path)
    if tokenizer:
        byte_tokenizer(chat=chat).save_pretrained(path)
    return str(path)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "skipdecode.cli", *arguments]


def subprocess_environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`skipdecode` with these arguments in a process of its own."""
    options = {"capture_output": True, "text": True, "timeout": 240, "env": subprocess_environment()} | options
    return subprocess.run(command(*arguments), **options)


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def read_rows(path: Path | str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
