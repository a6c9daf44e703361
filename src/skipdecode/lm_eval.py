"""A model of EleutherAI's lm-evaluation-harness: an import of this module registers it there as `skipdecode`.

>>> import lm_eval, skipdecode.lm_eval                                            # doctest: +SKIP
>>> lm_eval.simple_evaluate("skipdecode", "pretrained=smollm2-135m,schedule=2x", tasks=["ifeval"])  # doctest: +SKIP

`python -m skipdecode.lm_eval` has the options of the harness's own command line.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from skipdecode.common.progress import progress_bar
from skipdecode.data.chats import render_chat, token_ids
from skipdecode.data.prompts import prompt_room
from skipdecode.errors import DataError, MissingExtraError, UsageError
from skipdecode.evaluation.scores import text_scores
from skipdecode.generation.llm import LLM
from skipdecode.models.loading.checkpoint import LoadedModel
from skipdecode.schedule import Schedule

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import Collator, normalize_gen_kwargs, resolve_max_length
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, warning_once
except ModuleNotFoundError:
    raise MissingExtraError("a model of lm-evaluation-harness", "lm-eval") from None

_AUTO_ROWS = 16
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")  # no option of greedy decoding


@register_model("skipdecode")
class SkipDecodeLM(TemplateLM):  # type: ignore[misc]
    """A model under one schedule, for tasks of lm-evaluation-harness.

    A log-likelihood is measured under the schedule: the context is the prompt, and the continuation has the generated
    positions 0, 1, …. The fast engine computes it by decoding, with its quantized weights; where the engine is
    transformers', it comes from the teacher-forced parallel form.

    `pretrained` and `options` are those of `skipdecode.LLM`, whose errors are raised too; without a GPU a "cuda"
    `device`, the default of the command line, is the CPU. A speed-up falls over `max_gen_toks` positions, the most new
    tokens of a task without a number. `batch_size` sequences are decoded together ("auto": 16). A context that, with
    its text, is longer than `max_length` (default: the model's context) loses its beginning.
    """

    eot_token_id = prefix_token_id = 0
    tokenizer_name = ""

    def __init__(
        self,
        pretrained: str | Path | LoadedModel,
        schedule: Schedule | str | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        **options: Any,
    ) -> None:
        super().__init__()
        self.batch_size = _AUTO_ROWS if str(batch_size).startswith("auto") else int(batch_size)
        device = None if str(device).startswith("cuda") and not torch.cuda.is_available() else device
        self.llm = LLM(pretrained, schedule, device=device, max_rows=self.batch_size, **options)
        self.schedule = self.llm.schedule_of(None, max_gen_toks)
        self.tokenizer, self._device = self.llm.tokenizer, self.llm.backend.model.device
        self.max_length = max_length or resolve_max_length(self.llm.loaded.model.config, self.tokenizer)
        self.max_gen_toks = max_gen_toks
        self.eot_token_id, start = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        self.prefix_token_id = self.eot_token_id if start is None else start  # the context of a text without one
        self.tokenizer_name = self.tokenizer.name_or_path.replace("/", "__")  # of the harness's cache of requests

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Token ids of a text; a text that begins with the start token gets no second one."""
        return token_ids(self.tokenizer, [string], special=add_special_tokens is not False)[0]

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a chat; without `add_generation_prompt` its last message goes on."""
        variables = {**self.llm.variables, "continue_final_message": not add_generation_prompt}
        return render_chat(self.tokenizer, chat_history, answer=add_generation_prompt, variables=variables)

    def get_model_info(self) -> dict[str, Any]:
        """Description of the model for the harness's result files."""
        about: dict[str, Any] = {"engine": self.llm.backend.name, "schedule": self.schedule.to_dict()}
        about["nominal_speedup"] = self.schedule.nominal_speedup
        return {"model_dtype": self.llm.backend.weights, "skipdecode": about}

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Connect the harness's file of responses (`use_cache`), whose keys leave the model out.

        Raises UsageError: the file has responses of another model or schedule.
        """
        super().set_cache_hook(cache_hook)
        identity = {"model": self.llm.loaded.checkpoint.name, **self.get_model_info()}
        if self.cache_hook.dbdict.setdefault("skipdecode", identity) != identity:
            raise UsageError("the file of use_cache has responses of another model or schedule: give another path")

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text of each request up to a stop string; requests with the same options are decoded together."""
        ordered = Collator([r.args for r in requests], lambda pair: -len(pair[0]), lambda pair: pair[1], "gen_kwargs")
        outputs: list[str] = []
        with progress_bar(len(requests), "text", name="lm-eval", shown=not disable_tqdm) as bar:
            for part in ordered.get_batched(n=4 * self.batch_size):
                texts = self._generated(
                    [context for context, _ in part], part[0][1], torch.initial_seed() + len(outputs)
                )
                for args, text in zip(part, texts, strict=True):
                    self.cache_hook.add_partial("generate_until", args, text)
                outputs += texts
                bar.update(len(part))
        return list(ordered.get_original(outputs))

    def _generated(self, contexts: list[str], arguments: dict[str, Any], seed: int) -> list[str]:
        options: dict[str, Any] = dict(normalize_gen_kwargs(arguments, self.max_gen_toks))
        new, stop = options.pop("max_gen_toks"), [text for text in options.pop("until") if text]
        if options.pop("do_sample"):
            options = {"temperature": 1.0, "seed": seed, **options}
        else:
            options = {name: value for name, value in options.items() if name not in _SAMPLED}
        prompts = [self._fitting(context, new) for context in contexts]
        outputs = self.llm.generate(prompts, new, schedule=self.schedule, stop=stop, template=False, **options)
        return [output.text for output in outputs]

    def _fitting(self, context: str, new: int) -> str:
        """The end of a context that leaves room for new tokens."""
        room, ids = prompt_room(self.max_length, new) or 0, self.tok_encode(context)
        while len(ids) > room:
            self._tell_cut()
            offsets = self.tokenizer(context, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
            context = context[offsets[len(ids) - room - 1][1] :]
            ids = self.tok_encode(context)
        return context

    def _tell_cut(self) -> None:
        message = f"a context that does not fit into {self.max_length} tokens loses its beginning (said once)"
        warning_once(logging.getLogger(__name__), message)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows of `max_length` that each begin at position 0."""
        texts = [
            get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1)
            for request in requests
        ]
        windows = [[(None, *make_disjoint_window(part)) for part in parts] for parts in texts]
        scores = [score for score, _ in self._loglikelihood_tokens([w for parts in windows for w in parts])]
        ends = accumulate(map(len, windows), initial=0)
        return [sum(scores[start:end]) for start, end in pairwise(ends)]

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether it is greedy; each request ends with their token ids."""
        contexts, texts = [], [text for _, _, text in requests]
        for _, context, text in requests:
            if len(text) > self.max_length:
                raise DataError(f"a continuation has {len(text)} tokens: give max_length={len(text)} or more")
            if len(context) + len(text) > self.max_length + 1:  # the last token is not fed
                self._tell_cut()
            contexts.append(context[-(self.max_length + 1 - len(text)) :])
        with progress_bar(len(texts), "text", name="lm-eval", shown=not disable_tqdm) as bar:
            scored = text_scores(self.llm.backend, self.schedule, contexts, texts, self.batch_size, bar.update)
        return [(-float(losses.sum()), bool(best.all())) for losses, best in scored]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
