"""The tokenizer of a GGUF file as a tokenizer of transformers, with the words and the defaults that llama.cpp has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skipdecode.errors import ModelLoadError
from skipdecode.models.loading.gguf_file import SPLITS
from skipdecode.models.loading.gguf_metadata import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens
# Tokens that end a text or a turn in llama.cpp, by their text: files name only some of them.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>", "<turn|>"),
    *("<end_of_utterance>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
)
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# transformers' names of special tokens -> GGUF's.
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPACE = "\u2581"  # in the words of sentencepiece


@dataclass(frozen=True)
class _Kind:
    """What llama.cpp does with a kind of tokenizer if the file does not say otherwise.

    `ids` are the special tokens, by GGUF's names. `whole_words`: a word that is a token is not merged of its parts.
    """

    ids: dict[str, int]
    adds_bos: bool = False
    whole_words: bool = False


_SENTENCEPIECE = _Kind({"bos": 1, "eos": 2, "unknown": 0}, adds_bos=True)
_BPE = _Kind({"bos": 11, "eos": 11})
_LLAMA3 = _Kind(_BPE.ids, adds_bos=True, whole_words=True)
# tokenizer.ggml.pre -> the split into words, and the kind.
_PRE: dict[str, tuple[str, _Kind]] = {
    "default": ("default", _BPE),
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), ("gpt-2", _BPE)),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "roberta-bpe", "gigachat", "a.x-4.0"), ("gpt-2", _BPE)),
    **dict.fromkeys(("mellum", "modern-bert", "exaone4", "mpt", "olmo", "jais", "trillion"), ("gpt-2", _BPE)),
    "granite-docling": ("gpt-2", _BPE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), ("smollm", _BPE)),
    **dict.fromkeys(("exaone", "minerva-7b"), ("smollm", _BPE)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"), ("llama-bpe", _LLAMA3)),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2", "jina-v5-nano"), ("llama-bpe", _LLAMA3)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), ("llama-bpe", _BPE)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), ("llama-bpe", _Kind({"eos": 11}))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), ("qwen2", _BPE)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open"), ("qwen2", _BPE)),
    "tekken": ("tekken", _LLAMA3),
}


class GgufTokenizer:
    """The tokenizer of a file.

    Raises ModelLoadError: the file has none, one of another type, or words that do not fit the model.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._model = self._get("model", "none")
        if self._model == "none":
            raise ModelLoadError(f"{file.path} has no tokenizer: give the model's directory or hub id instead")
        if self._model not in ("gpt2", "llama"):
            raise ModelLoadError(
                f"{file.path}: a tokenizer of type {self._model!r} is not read here: give its safetensors"
            )
        self._split, self._kind = "", _SENTENCEPIECE
        if self._model == "gpt2":
            name = self._get("pre", "") or "default"
            if name not in _PRE:
                raise ModelLoadError(f"{file.path}: words split as {name!r}: accepted are {', '.join(_PRE)}")
            self._split, self._kind = _PRE[name]
        self._words = [word or f"[EMPTY_{i}]" for i, word in enumerate(self._get("tokens", []))]
        rows = int(file.tensors["token_embd.weight"].shape[1])
        if not len(set(self._words)) == len(self._words) == rows:
            raise ModelLoadError(f"{file.path}: tokenizer.ggml.tokens are not {rows} different words, one for each row")
        self._types: list[int] = self._get("token_type", [])

    def _get(self, name: str, default: Any = None) -> Any:
        return self._file.values.get(f"tokenizer.ggml.{name}", default)

    def _id(self, name: str) -> int | None:
        """The special token that the file names, else llama.cpp's; None if the vocabulary has no such token."""
        ids = self._get(f"{name}_token_id"), self._kind.ids.get(name)
        return next((number for number in ids if number is not None and number < len(self._words)), None)

    def special_ids(self) -> dict[str, int]:
        """Start and padding tokens by transformers' names."""
        named = {f"{name}_id": self._id(_SPECIAL[name]) for name in ("bos_token", "pad_token")}
        return {name: number for name, number in named.items() if number is not None}

    def end_ids(self) -> list[int]:
        """Tokens that end a text or a turn, the one of a text first."""
        named = [number for name in _END_KEYS if (number := self._id(name)) is not None]
        return list(dict.fromkeys(named + [i for i, word in enumerate(self._words) if word in _ENDS]))

    def tokenizer(self) -> Any:
        """A tokenizer of transformers with special tokens and chat templates."""
        from tokenizers import AddedToken
        from transformers import PreTrainedTokenizerFast

        backend = self._byte_level() if self._model == "gpt2" else self._sentencepiece()
        ends = set(self.end_ids())
        special = ends | {i for i, kind in enumerate(self._types) if kind in (_UNKNOWN, _CONTROL)}
        added = [i for i, kind in enumerate(self._types) if kind == _USER_DEFINED or i in special]
        backend.add_tokens([AddedToken(self._words[i], normalized=False, special=i in special) for i in added])
        backend.post_processor = self._around()
        named = {name: number for name, key in _SPECIAL.items() if (number := self._id(key)) is not None}
        words = {name: self._words[number] for name, number in named.items()}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **words)
        tokenizer.chat_template = self._templates()
        tokenizer.model_max_length = self._file.size("context_length")
        return tokenizer

    def _templates(self) -> Any:
        """The chat template, or all of them by name."""
        prefix = "tokenizer.chat_template"
        templates = {key.removeprefix(f"{prefix}."): text for key, text in self._file.values.items() if key.startswith(prefix)}
        named = {name: text for name, text in templates.items() if isinstance(text, str) and name != prefix}
        main = templates.get(prefix)
        if not named:
            return main
        return named if main is None else {"default": main} | named

    def _around(self) -> Any:
        """What puts the tokens of start and end around a text."""
        from tokenizers import processors

        bos = self._id("bos") if self._get("add_bos_token", self._kind.adds_bos) else None
        eos = self._id("eos") if self._get("add_eos_token", False) else None
        before, after = ([] if number is None else [self._words[number]] for number in (bos, eos))
        return processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[(self._words[number], number) for number in {bos, eos} if number is not None],
        )

    def _byte_level(self) -> Any:
        """A byte-level BPE tokenizer that splits words as the file says."""
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        vocabulary = {word: i for i, word in enumerate(self._words)}
        pairs = [tuple(merge.split(" ", 1)) for merge in self._get("merges", [])]
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=self._kind.whole_words))
        if self._get("pre") == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        parts = SPLITS[self._split]
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

    def _sentencepiece(self) -> Any:
        """A tokenizer that merges the pair of pieces whose union has the highest score."""
        from tokenizers import Tokenizer, decoders, models, normalizers

        if len(scores := self._get("scores", [])) != len(self._words):
            raise ModelLoadError(f"{self._file.path}: tokenizer.ggml.scores are {len(scores)}: one a token is needed")
        ids = {word: i for i, word in enumerate(self._words)}
        merges: list[tuple[str, str]] = []
        for word in sorted(ids, key=lambda word: -scores[ids[word]]):
            halves = [(word[:i], word[i:]) for i in range(1, len(word))]
            known = [pair for pair in halves if pair[0] in ids and pair[1] in ids]
            merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        unknown = self._id("unknown")
        word = None if unknown is None else self._words[unknown]
        tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=word, fuse_unk=True, byte_fallback=True))
        spaces = normalizers.Replace(" ", _SPACE)
        back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._get("add_space_prefix", True):
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
            back.append(decoders.Strip(" ", 1, 0))
        else:
            tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(back)
        return tokenizer
