"""vLLM on a CPU, small and in this process, set up before it is imported."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a tiny Llama with the byte tokenizer, and the model."""
    from checkpoints import byte_tokenizer
    from engines import paper, save_tiny

    folder = tmp_path_factory.mktemp("llama")
    model = save_tiny(folder, paper(), vocab_size=259)
    byte_tokenizer().save_pretrained(folder)
    return folder, model
