"""Types of packages that take seconds to import, for the annotations of modules that do without them at first."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig as PeftConfig
    from peft import PeftModel as PeftModel
    from torch import Tensor as Tensor
    from transformers import GenerationConfig as GenerationConfig
    from transformers import PretrainedConfig as PretrainedConfig
    from transformers import PreTrainedModel as PreTrainedModel
    from transformers import PreTrainedTokenizerBase

    Device = torch.device
    Tokenizer = PreTrainedTokenizerBase
else:
    PeftConfig = PeftModel = GenerationConfig = PretrainedConfig = PreTrainedModel = Tokenizer = Tensor = Device = Any
