"""Ways of decoding behind one interface (`skipdecode.methods.base`), so that the same code runs, times and scores all.

A method is a name in `METHODS`. Most are nothing but a schedule (`skipdecode.methods.schedules.SCHEDULES`).
"""

from __future__ import annotations

from skipdecode.registry import Registry

__all__ = ["METHODS"]

METHODS = Registry(
    "method",
    {
        "full": "skipdecode.methods.full:Full",
        "schedule": "skipdecode.methods.scheduled:Scheduled",
        "calm": "skipdecode.methods.calm:Calm",
        "self_speculation": "skipdecode.methods.self_speculation:SelfSpeculation",
        "prompt_lookup": "skipdecode.methods.prompt_lookup:PromptLookup",
    },
)
