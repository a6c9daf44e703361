"""Tiny checkpoints, tokenizers and adapters on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BertConfig, BertModel, BertTokenizer, PreTrainedTokenizerFast

from tiny import tiny_model

IDS = torch.tensor([[5, 6, 7, 8]])
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The parts of the templates of Hermes and Qwen that matter to tools.
HERMES = (
    "{% if tools %}<system># Tools{% for t in tools %}{{ t | tojson }}{% endfor %} within <tool_call></tool_call>"
    "{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}<assistant>"
)
THINKING = (
    "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.a }}]{% endfor %}{% endfor %}"
    "<assistant>{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def chatml_tokenizer(chat: Any = CHATML) -> PreTrainedTokenizerFast:
    """The byte tokenizer with two more special tokens, 259 and 260, for the chat template of many models."""
    tokenizer = byte_tokenizer(chat)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def byte_tokenizer(chat: Any = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, 259 in all; ids 0, 1, 2 are padding, start and end. `chat` is its template, False for none."""
    special = ["<pad>", "<s>", "</s>"]
    vocab = {t: i for i, t in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )
    fast.chat_template = chat or None
    return fast


def save_tokenizer(folder: Path) -> None:
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "red", "green", "blue", "one", "two"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)


def save_checkpoint(folder: Path, schedule: Any = None, tokenizer: bool = True, dtype: Any = torch.float32) -> Any:
    model = tiny_model("llama").to(dtype)
    if schedule is not None:
        model.config.skipdecode = schedule
    model.save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)
    return model


def save_adapter(folder: Path, base: str, of: Any = None) -> Any:
    import peft  # of an extra

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(of or tiny_model("llama"), config).eval()
    model.save_pretrained(folder)
    edit_json(folder / "adapter_config.json", base_model_name_or_path=base)
    return model


def edit_json(file: Path, **values: Any) -> None:
    """Change entries of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def save_tiny_encoder(folder: Path, texts: list[str]) -> None:
    """A random BERT of 3 layers that knows the words of `texts`."""
    words = sorted({w.lower().strip(".") for text in texts for w in text.split()})
    vocab = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words])}
    BertTokenizer(vocab=vocab, model_max_length=64).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(vocab), **sizes)).save_pretrained(folder)
