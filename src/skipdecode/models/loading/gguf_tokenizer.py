"""The tokenizer of a GGUF file as a tokenizer of transformers, with the words and the defaults that llama.cpp has."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from skipdecode.errors import ModelLoadError
from skipdecode.models.loading.gguf_file import SPLITS
from skipdecode.models.loading.gguf_metadata import GgufFile, names

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens
# Tokens that end a text or a turn in llama.cpp, by their text: files name only some of them.
_ENDS = names(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>"
    " <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <eos> <turn|> <end_of_utterance> <|tool_response> <｜end▁of▁sentence｜>"
    " <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|file_sep|> <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"
)
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# transformers' names of special tokens -> GGUF's.
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# tokenizer.ggml.model -> special tokens that the file does not name.
_DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": {"bos": 11, "eos": 11}}
# tokenizer.ggml.pre: those that put the start token before a text, and take a word that is a token as a whole.
_LIKE_LLAMA3 = names("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano")
# The split into words -> the values of tokenizer.ggml.pre that name it.
_PRE = {
    "gpt-2": names(
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 "
        "mellum modern-bert exaone4 mpt olmo jais trillion granite-docling"
    ),
    "smollm": names("smollm starcoder refact command-r codeshell exaone minerva-7b"),
    "llama-bpe": [*_LIKE_LLAMA3, "dbrx", "smaug-bpe"],
    "qwen2": names("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open"),
    "default": ["default", ""],
}
_SPLIT_OF = {name: split for split, same in _PRE.items() for name in same}
_SPACE = "\u2581"  # in the words of sentencepiece


class GgufTokenizer:
    """The tokenizer of a file.

    Raises ModelLoadError: the file has none, one of another type, or words that do not fit the model.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._model, self._pre = self._get("model", "none"), self._get("pre", "")
        rows = int(file.tensors["token_embd.weight"].shape[1])
        if self._model == "none":
            raise ModelLoadError(f"{file.path} has no tokenizer: give the model's directory or hub id instead")
        if self._model not in _DEFAULT_IDS:
            raise ModelLoadError(f"{file.path}: a tokenizer of type {self._model!r} is not read: give its safetensors")
        if self._model == "gpt2" and self._pre not in _SPLIT_OF:
            raise ModelLoadError(f"{file.path}: words split as {self._pre!r}: accepted are {', '.join(_SPLIT_OF)}")
        self._words = [word or f"[EMPTY_{i}]" for i, word in enumerate(self._get("tokens", []))]
        self._ids = {word: i for i, word in enumerate(self._words)}
        if not len(self._ids) == len(self._words) == rows:
            raise ModelLoadError(f"{file.path}: tokenizer.ggml.tokens are not {rows} different words, one for each row")

    def _get(self, name: str, default: object = None) -> Any:
        return self._file.values.get(f"tokenizer.ggml.{name}", default)

    def _id(self, name: str) -> int | None:
        """The special token that the file names, else llama.cpp's; None if the vocabulary has no such token."""
        numbers = self._get(f"{name}_token_id"), _DEFAULT_IDS[self._model].get(name)
        return next((number for number in numbers if number is not None and number < len(self._words)), None)

    def special_ids(self) -> dict[str, int]:
        """The special tokens that a config names, by transformers' names."""
        numbers = {f"{name}_id": self._id(key) for name, key in _SPECIAL.items() if key != "unknown"}
        return {name: number for name, number in numbers.items() if number is not None}

    def end_ids(self) -> list[int]:
        """Tokens that end a text or a turn; the end of a text comes first."""
        numbers = [self._id(name) for name in _END_KEYS] + [i for word, i in self._ids.items() if word in _ENDS]
        return list(dict.fromkeys(number for number in numbers if number is not None))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A tokenizer of transformers with special tokens and chat templates."""
        backend = self._byte_level() if self._model == "gpt2" else self._sentencepiece()
        for word, kind in zip(self._words, self._get("token_type", []), strict=False):
            special = kind in (_UNKNOWN, _CONTROL) or word in _ENDS
            if special or kind == _USER_DEFINED:
                backend.add_tokens([AddedToken(word, normalized=False, special=special)])
        backend.post_processor = self._around()
        numbers = {name: self._id(key) for name, key in _SPECIAL.items()}
        words = {name: self._words[number] for name, number in numbers.items() if number is not None}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **words)
        tokenizer.chat_template = self._templates()
        tokenizer.model_max_length = self._file.size("context_length")
        return tokenizer

    def _templates(self) -> str | dict[str, str] | None:
        """The chat template, or all of them by name."""
        key = "tokenizer.chat_template"
        main, values = self._file.values.get(key), self._file.values.items()
        named = {name.removeprefix(f"{key}."): text for name, text in values if name.startswith(f"{key}.")}
        if not named or main is None:
            return named or main
        return named | {"default": main}

    def _around(self) -> processors.TemplateProcessing:
        """The processor that puts the tokens of start and end around a text."""
        begins = self._model == "llama" or self._pre in _LIKE_LLAMA3
        bos = self._id("bos") if self._get("add_bos_token", begins) else None
        eos = self._id("eos") if self._get("add_eos_token", False) else None
        before, after = ([] if number is None else [self._words[number]] for number in (bos, eos))
        return processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[(self._words[number], number) for number in {bos, eos} if number is not None],
        )

    def _byte_level(self) -> Tokenizer:
        """A byte-level BPE tokenizer that splits words as the file says."""
        pairs = [tuple(merge.split(" ", 1)) for merge in self._get("merges", [])]
        tokenizer = Tokenizer(models.BPE(self._ids, pairs, ignore_merges=self._pre in _LIKE_LLAMA3))
        if self._pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        parts = SPLITS[_SPLIT_OF[self._pre]]
        before: list[Any] = [
            pre_tokenizers.Digits(individual_digits=True)
            if isinstance(part, dict)
            else pre_tokenizers.Split(Regex(part), "isolated")
            for part in parts
        ]
        alone = not any(isinstance(part, str) for part in parts)  # the byte-level step then splits words itself
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=alone)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        """A tokenizer that merges the pair of pieces whose union has the highest score."""
        ids, scores = self._ids, self._get("scores", [])
        if len(scores) != len(ids):
            raise ModelLoadError(f"{self._file.path}: tokenizer.ggml.scores are {len(scores)}: one a token is needed")
        merges: list[tuple[str, str]] = []
        for word in sorted(ids, key=lambda word: -scores[ids[word]]):
            halves = [(word[:i], word[i:]) for i in range(1, len(word))]
            known = [pair for pair in halves if pair[0] in ids and pair[1] in ids]
            merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        unknown = self._id("unknown")
        word = None if unknown is None else self._words[unknown]
        tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=word, fuse_unk=True, byte_fallback=True))
        begins = self._get("add_space_prefix", True)
        spaces = normalizers.Replace(" ", _SPACE)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if begins else spaces
        back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if begins else back)
        return tokenizer
