"""Types of packages that take seconds to import, for the annotations of modules that do without them at first."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import PeftConfig as PeftConfig
    from peft import PeftModel as PeftModel
    from torch import Tensor as Tensor
    from torch import device as Device  # noqa: N812
    from transformers import PretrainedConfig as PretrainedConfig
    from transformers import PreTrainedModel as PreTrainedModel
    from transformers import PreTrainedTokenizerBase as PreTrainedTokenizerBase
else:
    PeftConfig = PeftModel = PretrainedConfig = PreTrainedModel = PreTrainedTokenizerBase = Tensor = Device = Any
