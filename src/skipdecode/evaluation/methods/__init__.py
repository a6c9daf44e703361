"""Ways of decoding behind one interface (`base.py`), so that the same code runs, times and scores all.

A method is a name in `METHODS`. Most are nothing but a schedule (`skipdecode.schedule.PUBLISHED`).
"""

from __future__ import annotations

from skipdecode.common.registry import Registry

__all__ = ["METHODS"]

METHODS = Registry(
    "method",
    {
        "full": "skipdecode.evaluation.methods.scheduled:Full",
        "schedule": "skipdecode.evaluation.methods.scheduled:Scheduled",
        "calm": "skipdecode.evaluation.methods.calm:Calm",
        "self_speculation": "skipdecode.evaluation.methods.drafting:SelfSpeculation",
        "prompt_lookup": "skipdecode.evaluation.methods.drafting:PromptLookup",
    },
)
