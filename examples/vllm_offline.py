"""Generate with vLLM under the schedule that a checkpoint carries, and at full depth.

    pip install '.[vllm]'
    skipdecode export path/to/adapter --format merged --out tuned
    python examples/vllm_offline.py tuned 'Say hello.' 'Name three rivers.'

Both packages are installed: no further option is needed. A request may name another schedule (docs/vllm.md).
"""

import sys
from typing import Any

from vllm import LLM, SamplingParams


def main(model: str, prompts: list[str], max_tokens: int = 64, **engine: Any) -> dict[str, list[str]]:
    """The texts of the prompts by schedule; `engine` are further options of vLLM's LLM."""
    llm = LLM(model, **engine)
    texts = {}
    for name, asked in (("the checkpoint's schedule", None), ("full depth", {"skipdecode": "full"})):
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=asked)
        texts[name] = [output.outputs[0].text for output in llm.generate(prompts, sampling)]
    return texts


if __name__ == "__main__":
    for name, texts in main(sys.argv[1], sys.argv[2:]).items():
        print(f"{name}:", *texts, sep="\n  ")
