"""Names of transformers' classes for annotations. Importing the classes themselves takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GenerationConfig as GenerationConfig
    from transformers import PreTrainedConfig as PreTrainedConfig
    from transformers import PreTrainedModel as PreTrainedModel
    from transformers import PreTrainedTokenizerBase

    Tokenizer = PreTrainedTokenizerBase
else:
    GenerationConfig = PreTrainedConfig = PreTrainedModel = Tokenizer = object
