"""Rules for the next token: what transformers' `generate` does to logits before it chooses a token.

A checkpoint's generation config names rules, and so may a request. The rules of a sequence are transformers' own logits
processors, which are imported where they are made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING, Any

from skipdecode.common.options import Options, option, setting
from skipdecode.common.types import GenerationConfig
from skipdecode.errors import OptionError, UsageError

if TYPE_CHECKING:
    from transformers import LogitsProcessor

_LOWER = {
    "repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size", "suppress_tokens",
    "encoder_no_repeat_ngram_size", "begin_suppress_tokens", "bad_words_ids", "min_new_tokens", "min_length",
}  # fmt: skip
_OF_OPENAI = ("frequency_penalty", "presence_penalty")  # transformers has no such rule
_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_LEFT_OUT: dict[str, tuple[object, ...]] = {
    "do_sample": (False,), "num_beams": (1,), "num_beam_groups": (1,), "num_return_sequences": (1,),
    "penalty_alpha": (0,), "dola_layers": (), "constraints": (), "force_words_ids": (), "guidance_scale": (1,),
    "watermarking_config": (), "token_healing": (False,), "max_time": (), "max_length": (20,), "max_new_tokens": (),
}  # fmt: skip
"""Entries of a generation config that change texts and are not followed, with the values that change nothing."""


@dataclass(frozen=True)
class Rules(Options):
    """Rules by transformers' names, and OpenAI's two penalties; they hold for greedy decoding too.

    The defaults change nothing. No sequence of token ids of `bad_words_ids` comes. `sequence_bias` has a number for
    sequences: it is added to the logit of the last token where the others have come.
    """

    repetition_penalty: float = option(
        "logits of tokens seen in prompt or output are divided by it (multiplied where negative)", default=1.0, above=0
    )
    frequency_penalty: float = setting(
        "taken from a token's logit for each time that the output has it", default=0.0, least=-2, most=2
    )
    presence_penalty: float = setting(
        "taken from the logits of tokens that the output has, however often", default=0.0, least=-2, most=2
    )
    no_repeat_ngram_size: int = setting("so many tokens in a row do not come again; 0: they may", default=0, least=0)
    suppress_tokens: tuple[int, ...] = setting("token ids that do not come", default=(), least=0)
    begin_suppress_tokens: tuple[int, ...] = setting("token ids that do not come first", default=(), least=0)
    min_new_tokens: int | None = setting("new tokens before which no end token comes", default=None, least=0)
    min_length: int = setting("the same with the prompt's tokens; min_new_tokens replaces it", default=0, least=0)
    encoder_repetition_penalty: float = setting("logits of the prompt's tokens are multiplied", default=1.0, above=0)
    encoder_no_repeat_ngram_size: int = setting("no so many tokens of the prompt in a row come", default=0, least=0)
    forced_bos_token_id: int | None = setting("the token after a prompt of one token", default=None, least=0)
    forced_eos_token_id: tuple[int, ...] = setting("last tokens at the length limit", default=(), least=0)
    exponential_decay_length_penalty: tuple[float, ...] = setting(
        "the new token from which end tokens' logits grow, and by which factor", default=()
    )
    remove_invalid_values: bool = setting("logits that are no numbers are 0", default=False)
    renormalize_logits: bool = setting("log-probabilities take the place of logits", default=False)
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()

    def __post_init__(self) -> None:
        for rule in fields(Rules):
            object.__setattr__(self, rule.name, _tuples(getattr(self, rule.name)))
        if isinstance(end := self.forced_eos_token_id, int):
            object.__setattr__(self, "forced_eos_token_id", (end,))
        super().__post_init__()
        decay, pairs = self.exponential_decay_length_penalty, self.sequence_bias
        if len(decay) not in (0, 2):
            raise OptionError("exponential_decay_length_penalty", decay, "two numbers, such as [15, 1.6]")
        if not isinstance(self.bad_words_ids, tuple) or not all(map(_is_sequence, self.bad_words_ids)):
            raise OptionError("bad_words_ids", self.bad_words_ids, "lists of token ids, such as [[5], [7, 8]]")
        if not isinstance(pairs, tuple) or not all(map(_is_bias, pairs)):
            raise OptionError("sequence_bias", pairs, "lists of token ids with a number each: [[[7, 8], -2.0]]")

    @property
    def active(self) -> dict[str, Any]:
        """The values that are not the defaults, by name."""
        return {f.name: value for f in fields(Rules) if (value := getattr(self, f.name)) != f.default}

    @property
    def only_lower(self) -> bool:
        """Whether no logit rises under the rules."""
        signs = min(self.frequency_penalty, self.presence_penalty) >= 0 and self.repetition_penalty >= 1
        return signs and self.active.keys() <= _LOWER

    @property
    def named_tokens(self) -> list[int]:
        """The token ids that have to be of the vocabulary."""
        first = () if self.forced_bos_token_id is None else (self.forced_bos_token_id,)
        biased = (sequence for sequence, _ in self.sequence_bias)
        return [*chain(first, self.forced_eos_token_id, *self.bad_words_ids, *biased)]

    def processors(self, prompt: Sequence[int], most: int, ends: Collection[int]) -> list[LogitsProcessor]:
        """transformers' processors for a sequence of at most `most` new tokens, in the order of `generate`.

        `ends` are the end tokens. The penalties of OpenAI are no processors.
        """
        bad_words = [[*words] for words in self.bad_words_ids if words not in {(end,) for end in ends}]
        idle = {*_OF_OPENAI}
        if not bad_words:
            idle.add("bad_words_ids")
        if self.min_new_tokens is not None:
            idle.add("min_length")
        if not ends:
            idle |= {"min_length", "min_new_tokens", "exponential_decay_length_penalty"}
        active = {name: value for name, value in self.active.items() if name not in idle}
        if not active:
            return []
        import torch
        from transformers.generation import logits_process as hf

        text, size = torch.tensor([prompt], dtype=torch.int64), len(prompt)
        begin = size + 1 if size == 1 and self.forced_bos_token_id is not None else size
        makers = {
            "sequence_bias": lambda v: hf.SequenceBiasLogitsProcessor({s: float(bias) for s, bias in v}),
            "encoder_repetition_penalty": lambda v: hf.EncoderRepetitionPenaltyLogitsProcessor(float(v), text),
            "repetition_penalty": lambda v: hf.RepetitionPenaltyLogitsProcessor(float(v)),
            "no_repeat_ngram_size": hf.NoRepeatNGramLogitsProcessor,
            "encoder_no_repeat_ngram_size": lambda v: hf.EncoderNoRepeatNGramLogitsProcessor(v, text),
            "bad_words_ids": lambda v: hf.NoBadWordsLogitsProcessor(bad_words),
            "min_length": lambda v: hf.MinLengthLogitsProcessor(v, [*ends]),
            "min_new_tokens": lambda v: hf.MinNewTokensLengthLogitsProcessor(size, v, [*ends]),
            "forced_bos_token_id": hf.ForcedBOSTokenLogitsProcessor,
            "forced_eos_token_id": lambda v: hf.ForcedEOSTokenLogitsProcessor(size + most, [*v]),
            "remove_invalid_values": lambda v: hf.InfNanRemoveLogitsProcessor(),
            "exponential_decay_length_penalty": lambda v: hf.ExponentialDecayLengthPenalty(v, [*ends], size),
            "suppress_tokens": hf.SuppressTokensLogitsProcessor,
            "begin_suppress_tokens": lambda v: hf.SuppressTokensAtBeginLogitsProcessor(v, begin),
            "renormalize_logits": lambda v: hf.LogitNormalization(),
        }
        return [make(active[name]) for name, make in makers.items() if name in active]


def rules_of(config: GenerationConfig) -> Rules:
    """The rules of a `GenerationConfig`; raises UsageError for a value that is not accepted."""
    values = {f.name: getattr(config, f.name, None) for f in fields(Rules) if f.name not in _OF_OPENAI}
    try:
        return Rules(**{name: value for name, value in values.items() if value is not None})
    except OptionError as e:
        raise UsageError(f"generation_config.json: {e}, or --no-generation-config") from None


def rules_line(config: GenerationConfig) -> str | None:
    """One line for users: which rules of a `GenerationConfig` are followed, and what is left out of it, if anything."""
    names = [name for name, neutral in _LEFT_OUT.items() if getattr(config, name, None) not in (None, *neutral)]
    if "do_sample" in names:
        names += [name for name in _OF_SAMPLING if getattr(config, name, None) is not None]
    followed = [*rules_of(config).active, *(["stop_strings"] if stop_strings(config) else [])]
    parts = [
        f"{verb} {', '.join(f'{name}={getattr(config, name)!s:.60}' for name in listed)}"
        for verb, listed in (("follows", followed), ("leaves out", names))
        if listed
    ]
    hint = "; --no-generation-config follows nothing" if followed else ""
    return f"generation_config.json: decoding {' and '.join(parts)}{hint}" if parts else None


def stop_strings(config: GenerationConfig) -> tuple[str, ...]:
    """The stop strings of a `GenerationConfig`; raises UsageError for what is no text."""
    value = getattr(config, "stop_strings", None) or ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(text, str) and text for text in strings):
        raise UsageError(f"generation_config.json: stop_strings={value!r}: give texts, or --no-generation-config")
    return tuple(strings)


def _tuples(value: Any) -> Any:
    """A value with tuples in place of lists, arrays and mappings, at any depth."""
    value = value.tolist() if hasattr(value, "tolist") else value
    value = [*value.items()] if isinstance(value, Mapping) else value
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _is_sequence(value: object) -> bool:
    """Whether a value is token ids, at least one."""
    return isinstance(value, tuple) and bool(value) and all(type(token) is int and token >= 0 for token in value)


def _is_bias(value: object) -> bool:
    """Whether a value is token ids and a number."""
    return isinstance(value, tuple) and len(value) == 2 and _is_sequence(value[0]) and isinstance(value[1], int | float)
