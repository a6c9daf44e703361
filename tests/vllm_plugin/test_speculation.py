"""Drafts from the prompt (ngram). The last file: it has vLLM load numba, after which it starts no engine here."""

from __future__ import annotations

from pathlib import Path

from engines import engine, generate, own_engine, paper, prompts, reference, save_tiny, set_mode
from routers import router_for
from skipdecode.engine.adaptive import ROUTER_FILE, Adaptive


def test_drafts_from_the_prompt(tmp_path: Path):
    model = save_tiny(tmp_path, paper())
    (router := router_for(model)).save(tmp_path / ROUTER_FILE)
    texts = [p * 3 for p in prompts((7, 5, 9), seed=3)]
    expected = reference(model, paper(), texts, [40] * 3)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with engine(tmp_path, speculative_config=drafts) as llm:
        for mode in ("nested", "where", "auto"):
            set_mode(llm, mode)
            assert generate(llm, texts, [40] * 3) == expected, mode
        new, names = [40, 30, 20] * 2, ["adaptive", None, "adaptive", None, "adaptive", "adaptive"]
        chosen = [
            own_engine(model, Adaptive.choosing(router), [t], [n])[0][0] for t, n in zip(texts * 2, new, strict=True)
        ]
        found = generate(llm, texts * 2, new, names)
        for name, tokens, adaptive, plain in zip(names, found, chosen, expected * 2, strict=True):
            assert tokens == (plain[: len(tokens)] if name is None else adaptive)
