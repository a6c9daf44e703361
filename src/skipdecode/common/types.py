"""Types of packages that take seconds to import, for the annotations of modules that do without them at first."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig as PeftConfig
    from peft import PeftModel as PeftModel
    from torch import Tensor as Tensor
    from transformers import PretrainedConfig as PretrainedConfig
    from transformers import PreTrainedModel as PreTrainedModel
    from transformers import PreTrainedTokenizerBase as PreTrainedTokenizerBase

    Device = torch.device
else:
    PeftConfig = PeftModel = PretrainedConfig = PreTrainedModel = PreTrainedTokenizerBase = Tensor = Device = Any
