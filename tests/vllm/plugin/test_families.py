"""Every architecture of the table, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engines import compiled_graphs, engine, generate, pieces_of, prompts, reference, save_tiny
from skipdecode import Schedule
from skipdecode.models.families import FAMILIES
from skipdecode.vllm.gates import PROJECTS
from tiny import LAYERS

MODEL_TYPES = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if kind in FAMILIES}
NESTED = Schedule(LAYERS, (4, 1, 6, 3, 5, 2), (8, 7, 7, 4, 4, 3, 2), name="random-nested")
FROM_THE_FIRST = Schedule.paper(
    LAYERS, min_exit_layer=2, max_exit_layer=6, seq_len=6, warmup_layers=0, name="no-warm-up"
)
SPLIT = Schedule.split(LAYERS, 4, (6, 5, 3), name="split")


# Compiled starts take long. These differ most: no residual, layers of two kinds, through transformers, experts.
COMPILED = ("Gemma3ForCausalLM", "MixtralForCausalLM", "OPTForCausalLM", "Olmo2ForCausalLM")


@pytest.mark.parametrize("architecture", PROJECTS)
def test_family(tmp_path: Path, architecture: str):
    model: Any = save_tiny(tmp_path, NESTED, MODEL_TYPES[architecture])
    texts, new = prompts((9, 4, 17, 40)), (20, 30, 7, 16)
    # First, because vLLM changes transformers' own classes where it runs a model through them.
    more = [FROM_THE_FIRST, SPLIT] if PROJECTS[architecture] else [FROM_THE_FIRST]
    expected = {schedule.name: reference(model, schedule, texts, new) for schedule in (NESTED, *more)}
    options = {"additional_config": {"skipdecode": {"schedules": [s.to_dict() for s in more]}}}
    for eager in (True, False) if architecture in COMPILED else (True,):
        with engine(tmp_path, max_num_batched_tokens=24, enforce_eager=eager, **options) as llm:
            graphs = compiled_graphs()
            assert pieces_of(llm).eager == eager
            assert pieces_of(llm).count <= 5
            for name, tokens in expected.items():
                assert generate(llm, texts, new, [name] * 4) == tokens, (eager, name)
            assert compiled_graphs() == graphs
