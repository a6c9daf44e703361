"""Grammars that outputs have to fit: JSON schemas, regular expressions, choices and context-free grammars.

llguidance compiles them for a tokenizer, and refuses what it cannot enforce. A compiled grammar is a matcher, whose
copies say in `skipdecode.engine.sampling` which tokens may come next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from skipdecode.common.types import Tokenizer
from skipdecode.errors import GrammarError, MissingExtraError, UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

JsonSchema = Mapping[str, object] | str
"""A JSON schema, or its text."""
GrammarSource = JsonSchema | Sequence[str]
GrammarKind = Literal["json", "regex", "choice", "grammar", "lark"]

_MOST_COMPILED = 32  # cached grammars
_MOST_TRIES = 200  # sub-schemas that are compiled to find the one that is refused
_MOST_STATES = 20_000  # of a lexer, each about 2 kB
# Between the tokens of a JSON text: nothing, a space, or a line break with its indentation. A model that repeats white
# space would otherwise never end.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"( |\n {0,32})", "lenient": False, "coerce_one_of": False}
_ITS_OPTION = ". Enable 'coerce_one_of' option to approximate oneOf with anyOf"  # which users do not have
_NAMED_SCHEMAS = {"$defs", "definitions", "properties", "patternProperties", "dependentSchemas"}  # name -> schema
_SCHEMAS = ("items", "additionalProperties", "additionalItems", "prefixItems", "anyOf", "oneOf", "allOf")


class Grammars:
    """Compiler of grammars for a tokenizer; not safe for several threads.

    `tokenizer`: None: grammars are checked, and `compile` returns None. `vocab_size`: tokens of the model. `ends`:
    tokens that end an output.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, ends: Collection[int]) -> None:
        self.tokenizer: Tokenizer = tokenizer
        self.vocab_size, self._ends = vocab_size, sorted(ends)
        self._tokens: LLTokenizer | None = None
        self._compiled = lru_cache(maxsize=_MOST_COMPILED)(self._compile)

    def compile(self, kind: GrammarKind, source: GrammarSource) -> LLMatcher | None:
        """Compile a grammar for `Sampling.grammar`.

        `source` is a JSON schema (an object or its text); a regular expression in Rust's syntax, which the whole text
        matches; a list of texts; or a grammar in the syntax of Lark or GBNF (kind "lark": of Lark).

        Raises GrammarError: llguidance cannot enforce it; UsageError: the tokenizer or the model is not fit for it;
        MissingExtraError: llguidance is not installed.
        """
        try:
            text = source if isinstance(source, str) else json.dumps(source)
            schema = json.loads(text) if kind == "json" else None
        except (TypeError, ValueError, RecursionError):
            raise GrammarError("the schema is not JSON") from None
        if kind == "json" and not isinstance(schema, dict):
            raise GrammarError('a JSON schema is an object, such as {"type": "object"}')
        try:
            return self._compiled(kind, text)
        except GrammarError as e:
            if schema is None:
                raise
            raise GrammarError(str(e), self._refused_part(schema)) from None

    def _compile(self, kind: GrammarKind, source: str) -> LLMatcher | None:
        try:
            from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
        except ImportError:
            raise MissingExtraError("structured output", "structured") from None
        if self._tokens is None and self.tokenizer is not None:
            if not self._ends:
                raise UsageError("this model has no end token, which a structured output needs")
            try:
                self._tokens = LLTokenizer(_plain(self.tokenizer), self.vocab_size, self._ends)
            except (AttributeError, ValueError) as e:
                raise UsageError(f"this tokenizer is not fit for structured output: {e}") from None
        try:
            text = (
                LLMatcher.grammar_from_json_schema(source, overrides=JSON_OPTIONS)
                if kind == "json"
                else grammar_from(kind, source)
            )
            limits = LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)
            matcher = None if self._tokens is None else LLMatcher(self._tokens, text, log_level=0, limits=limits)
            error = LLMatcher.validate_grammar(text) if matcher is None else matcher.get_error()
        except ValueError as e:
            error = str(e)
        if error:
            raise GrammarError(" ".join(error.split()).replace(_ITS_OPTION, ": give anyOf")[:300])
        return matcher

    def _refused_part(self, schema: dict[str, object]) -> str:
        """Find the deepest part of a refused schema that is refused alone; returns its JSON pointer."""
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        pointer, part, tries = "", schema, 0
        while True:
            for name, inner in _parts(part):
                tries += 1
                if tries > _MOST_TRIES:
                    return pointer
                try:
                    self._compile("json", json.dumps(shared | inner))
                except GrammarError:
                    pointer, part = pointer + name, inner
                    break
            else:
                return pointer


def _plain(tokenizer: Tokenizer) -> str:
    """Write a tokenizer as JSON, with special tokens under names that no text has.

    llguidance encodes text that a grammar forces, and would take the special token for a text that is its name. It
    takes every added token in angle brackets for a special one, and then refuses the token that it has forced.
    """
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document |= dict.fromkeys(("truncation", "padding", "post_processor"))
    names: dict[str, str] = {}
    for token in document["added_tokens"]:
        if token["special"] or re.fullmatch("<.*>", token["content"], re.DOTALL):
            names[token["content"]] = hidden = f"\ufdd0{token['id']}"
            token |= {"content": hidden, "special": True}
    model, vocabulary = document["model"], document["model"]["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(word, word): number for word, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(word, word), score] for word, score in vocabulary]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return json.dumps(document)


def _parts(schema: dict[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the schemas in a schema that are objects, each with its path; definitions first."""
    for key in [*sorted(_NAMED_SCHEMAS & schema.keys()), *(key for key in _SCHEMAS if key in schema)]:
        inner = schema[key]
        if key not in _NAMED_SCHEMAS and isinstance(inner, dict):
            yield f"/{key}", inner
        elif isinstance(inner, dict | list):
            for name, part in inner.items() if isinstance(inner, dict) else enumerate(inner):
                if isinstance(part, dict):
                    yield f"/{key}/{str(name).replace('~', '~0').replace('/', '~1')}", part
