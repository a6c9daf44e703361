"""Drafts from the prompt (ngram). The last file: it has vLLM load numba, after which it starts no engine here."""

from __future__ import annotations

from pathlib import Path

from engines import engine, generate, paper, prompts, reference, save_tiny


def test_drafts_from_the_prompt(tmp_path: Path):
    model = save_tiny(tmp_path, paper())
    texts = [p * 3 for p in prompts((7, 5, 9), seed=3)]
    expected = reference(model, paper(), texts, [40] * 3)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with engine(tmp_path, speculative_config=drafts) as llm:
        assert generate(llm, texts, [40] * 3) == expected
