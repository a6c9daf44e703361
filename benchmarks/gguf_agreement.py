"""A GGUF file read here and run by llama.cpp: tokens, greedy texts, KL of the logits, memory of reading.

    python benchmarks/gguf_agreement.py --out results/gguf.json MODEL.gguf [MODEL.gguf …]

Five prompts, 32 greedy tokens each in fp32; llama.cpp (cyllama, of the extra dev) gets the same tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cyllama.llama import llama_cpp

from skipdecode.common.environment import environment
from skipdecode.models.loading.gguf_reader import convert
from skipdecode.models.loading.hub import load_model

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n: int) -> int:\n    ",
    "It's 12,345 km (or 7671 miles) from  here;\n\n",
    "name[The Eagle], eatType[coffee shop], food[Japanese], customer rating[5 out of 5]\n",
    "Once upon a time, in a café in São Paulo,",
)
NEW = 32


class Model(llama_cpp.LlamaModel):  # type: ignore[misc]
    """With the size that cyllama 0.2.18's get_logits_ith asks for and its model does not have."""

    @property
    def n_vocab(self) -> int:
        return int(self.get_vocab().n_vocab)


def converted(file: str, target: str, results: Any) -> None:
    """Convert a file in this process, and report the growth of its peak memory in bytes."""
    import gguf  # noqa: F401

    before = peak()
    convert(Path(file), Path(target))
    results.put(peak() - before)


def peak() -> int:
    """Peak memory of this process in bytes, with the mapped pages of the file."""
    status = Path("/proc/self/status").read_text().split()
    return 1024 * int(status[status.index("VmHWM:") + 1])


def logits_of(context: Any, tokens: Sequence[int]) -> torch.Tensor:
    """llama.cpp's logits after each token."""
    context.kv_cache_clear()
    batch = llama_cpp.LlamaBatch(n_tokens=512, embd=0, n_seq_max=1)
    batch.set_batch(list(tokens), 0, True)
    context.decode(batch)
    return torch.tensor([list(context.get_logits_ith(i)) for i in range(len(tokens))])


def compare(file: Path) -> dict[str, Any]:
    """The result of one file."""
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        results = spawn.Queue()
        process = spawn.Process(target=converted, args=(str(file), folder, results))
        process.start()
        memory = results.get()
        process.join()
        stored = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        loaded = load_model(folder, dtype="float32")
    tokenizer: Any = loaded.tokenizer
    options, running = llama_cpp.LlamaModelParams(), llama_cpp.LlamaContextParams()
    options.n_gpu_layers = 0
    running.n_ctx = running.n_batch = running.n_ubatch = 512
    model = Model(str(file), options)
    context = llama_cpp.LlamaContext(model, running)
    same_ids = same_tokens = total = 0
    kl: list[float] = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt).input_ids
        theirs = list(model.get_vocab().tokenize(prompt, True, False))
        same_ids += ids == theirs
        with torch.no_grad():
            text = loaded.model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
            ours = loaded.model(text).logits[0, len(ids) - 1 : -1].float()
        found = logits_of(context, text[0, :-1].tolist())[len(ids) - 1 :]
        same_tokens += int((found.argmax(-1) == ours.argmax(-1)).sum())
        total += len(ours)
        p, q = ours.log_softmax(-1), found[:, : ours.shape[1]].log_softmax(-1)
        kl += ((q.exp() * (q - p)).sum(-1)).tolist()
    return {
        "file": file.name,
        "model_type": loaded.model.config.model_type,
        "prompts_with_same_ids": same_ids,
        "prompts": len(PROMPTS),
        "same_greedy_tokens": same_tokens,
        "tokens": total,
        "kl_mean": sum(kl) / len(kl),
        "kl_most": max(kl),
        "checkpoint_bytes": stored,
        "peak_bytes_of_reading": memory,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, write and print; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    rows = [compare(file) for file in options.files]
    document = {"kind": "gguf-agreement", "rows": rows, "environment": environment()}
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
