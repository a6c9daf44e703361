"""Texts that have to fit a grammar: parsed, validated, and the same in every batch, under schedules and exact."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from tokenizers import decoders

from checkpoints import byte_tokenizer
from engine_tools import Always
from serve_tools import SCHEDULES, tiny_served_model
from skipdecode.engine import FastEngine, GatedEngine, Request, Sampling
from skipdecode.engine.kernels.head import NativeHead
from skipdecode.errors import GrammarError, UsageError
from skipdecode.generation.grammar import Grammars

TOKENIZER = byte_tokenizer()
WORD = {"type": "string", "maxLength": 6}
SCHEMAS = {
    "anything": {},
    "true": {"type": ["boolean", "null"]},
    "string": {"type": "string", "minLength": 2, "maxLength": 9},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "part": {"type": "string", "pattern": "ab+c", "maxLength": 12},
    "integer": {"type": "integer", "minimum": -3, "exclusiveMaximum": 1000},
    "number": {"type": "number", "minimum": 0.5, "maximum": 9.5},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "enum": {"enum": ["red", "green", 3, None, {"a": [1]}]},
    "const": {"const": {"a": 1, "b": [True]}},
    "names of special tokens": {"enum": ["a</s>b", "<s>"]},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "date-time"},
    "array": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, WORD], "items": False, "minItems": 2},
    "contains nothing": {"type": "array", "maxItems": 0},
    "object": {"type": "object", "properties": {"a": WORD, "b": {"type": "null"}}, "required": ["b"]},
    "closed": {"type": "object", "properties": {"a": WORD}, "required": ["a"], "additionalProperties": False},
    "nested": {
        "type": "object",
        "properties": {"x": {"type": "object", "properties": {"y": {"type": "array", "items": WORD, "maxItems": 2}}}},
        "required": ["x"],
    },
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "named by pattern": {
        "type": "object",
        "patternProperties": {"^n[0-9]$": {"type": "integer", "minimum": 0, "maximum": 5}},
        "additionalProperties": False,
    },
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"k": WORD}, "required": ["k"]}]},
    "one of": {"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 20}]},
    "reference": {"$defs": {"w": WORD}, "type": "array", "items": {"$ref": "#/$defs/w"}, "maxItems": 3},
    "beside a reference": {"$defs": {"w": {"type": "string"}}, "$ref": "#/$defs/w", "maxLength": 3},
    "recursive": {
        "$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}, "additionalProperties": False}},
        "$ref": "#/$defs/t",
    },
    "without a type": {"properties": {"a": {"minimum": 3}}, "required": ["a"]},
    "letters": {"type": "object", "properties": {"größe": {"enum": ["ä", "\n", '"', "日"]}}, "required": ["größe"]},
}
REFUSED = [
    ("/properties/a~1b", {"properties": {"a/b": {"not": {"type": "string"}}}}),
    ("/$defs/w", {"$defs": {"w": {"type": "array", "uniqueItems": True}}, "items": {"$ref": "#/$defs/w"}}),
    ("/anyOf/1/properties/k", {"anyOf": [{"type": "null"}, {"properties": {"k": {"if": {}, "then": {}}}}]}),
    ("/prefixItems/0", {"prefixItems": [{"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 1}]}]}),
    ("", {"type": "string", "pattern": "(?=a)b"}),
    ("", {"type": "string", "minLength": 3, "maxLength": 1}),
    ("", {"$ref": "http://127.0.0.1:9/schema.json"}),
]
W = {"type": "string"}
ONE = {"enum": [1]}
SAMPLES = {
    "type": W, "enum": ONE, "const": {"const": 1}, "properties": {"properties": {"a": W}},
    "required": {"required": ["a"]},
    "additionalProperties": {"additionalProperties": W}, "patternProperties": {"patternProperties": {"^a": W}},
    "items": {"items": W}, "prefixItems": {"prefixItems": [W]}, "minItems": {"minItems": 1},
    "maxItems": {"maxItems": 2},
    "minProperties": {"minProperties": 1}, "maxProperties": {"maxProperties": 2}, "minLength": {"minLength": 1},
    "maxLength": {"maxLength": 2}, "pattern": {"pattern": "a+"}, "minimum": {"minimum": 1}, "maximum": {"maximum": 2},
    "exclusiveMinimum": {"exclusiveMinimum": 1}, "exclusiveMaximum": {"exclusiveMaximum": 2},
    "multipleOf": {"multipleOf": 5}, "anyOf": {"anyOf": [W, ONE]}, "allOf": {"allOf": [W, {"maxLength": 2}]},
    "$ref": {"$ref": "#/$defs/a", "$defs": {"a": W}}, "$defs": {"$ref": "#/$defs/a", "$defs": {"a": W}},
    "oneOf": {"oneOf": [W, {"type": "string", "maxLength": 2}]},
    "not": {"not": W}, "if": {"if": W, "then": ONE}, "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": W}}, "uniqueItems": {"uniqueItems": True},
    "contains": {"contains": W},
}  # fmt: skip
# Closers, so that random weights come to an end.
BIAS = dict.fromkeys(TOKENIZER('"}]', add_special_tokens=False).input_ids, 7.0)


@pytest.fixture(scope="module")
def model():
    return tiny_served_model()


@pytest.fixture(scope="module")
def grammars():
    return Grammars(TOKENIZER, 259, {2})


def request(grammar, seed=1, **options):
    settings = {"temperature": 1.0, "seed": seed, "logit_bias": BIAS, "grammar": grammar}
    sampling = Sampling(**settings | options.pop("sampling", {}))
    return Request(tuple(TOKENIZER(f"number {seed}").input_ids), 600, sampling, frozenset({2}), **options)


def texts(engine, requests):
    done = engine.decode(requests)
    assert {each.finish_reason for each in done} == {"eos"}
    return [TOKENIZER.decode(each.tokens, skip_special_tokens=True) for each in done]


def validate(text, schema):
    jsonschema.validate(
        json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=jsonschema.FormatChecker()
    )


@pytest.mark.parametrize("draws", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_finished_texts_are_valid(model, grammars, draws):
    asked = [(schema, seed) for schema in SCHEMAS.values() for seed in range(draws)]
    requests = [request(grammars.compile("json", schema), seed) for schema, seed in asked]
    found = texts(FastEngine(model, SCHEDULES["nested"], max_rows=16), requests)
    for text, (schema, _) in zip(found, asked, strict=True):
        validate(text, schema)
    assert len(set(found)) > len(SCHEMAS) * 2 // 3


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.0, "logit_bias": {}}, {"top_k": 3}])
def test_batches_engines_heads_and_exact_decoding_change_nothing(model, grammars, sampling, monkeypatch):
    schemas = [grammars.compile("json", SCHEMAS[name]) for name in ("closed", "array", "pattern", "enum")]
    wanted = [request(grammar, i, sampling=sampling) for i, grammar in enumerate(schemas)]
    free = Request(tuple(TOKENIZER("free").input_ids), 30, stop_ids=frozenset({2}))
    for schedule in SCHEDULES.values():
        alone = [FastEngine(model, schedule).decode([each])[0].tokens for each in (*wanted, free)]
        for engine in (FastEngine(model, schedule), GatedEngine(model, schedule)):
            assert [each.tokens for each in engine.decode([*wanted, free])] == alone
        with monkeypatch.context() as patched:
            patched.setattr(NativeHead, "short_from", 0)
            assert [each.tokens for each in FastEngine(model, schedule).decode([*wanted, free])] == alone
    engine = FastEngine(model, SCHEDULES["nested"])
    engine.planner = Always(3)
    plain = [request(grammar, i, sampling=sampling, exact=False) for i, grammar in enumerate(schemas)]
    for _ in range(2):  # the second time from earlier answers
        assert texts(engine, wanted) == texts(FastEngine(model, SCHEDULES["nested"]), plain)
    assert engine.stats.accepted_tokens


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forced_tokens_take_no_step(model, grammars, schedule):
    names = {"type": "object", "required": ["identifier", "postal_code"], "additionalProperties": False}
    schema = names | {"properties": {"identifier": {"type": "boolean"}, "postal_code": {"enum": [12345, 123]}}}
    asked = [request(grammars.compile("json", schema), seed, sampling={"logit_bias": {}}) for seed in range(4)]
    engines = FastEngine(model, SCHEDULES[schedule]), GatedEngine(model, SCHEDULES[schedule])
    found = [[each.tokens for each in engine.decode(asked)] for engine in engines]
    assert found[0] == found[1]
    fast, gated = (engine.stats for engine in engines)
    assert (fast.fed_tokens, fast.token_layers) == (gated.fed_tokens, gated.token_layers)
    assert fast.steps < gated.steps * 0.8
    short = Request(asked[0].prompt, 3, asked[0].sampling, frozenset({2}))
    assert engines[0].decode([short])[0].tokens == found[0][0][:3]


@pytest.mark.parametrize(("path", "schema"), REFUSED, ids=json.dumps)
def test_what_cannot_be_enforced_is_refused_with_its_place(grammars, path, schema):
    with pytest.raises(GrammarError) as refused:
        grammars.compile("json", schema)
    assert refused.value.path == path
    assert "\n" not in str(refused.value)


def test_a_tokenizer_that_is_not_fit_is_named(grammars):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    for given in (Grammars(tokenizer, 259, {2}), Grammars(TOKENIZER, 259, ())):
        with pytest.raises(UsageError, match=r"tokenizer|end token") as refused:
            given.compile("json", {"items": WORD})
        assert not isinstance(refused.value, GrammarError)


def test_the_keywords_of_the_docs(grammars):
    """docs/serve.md says of each keyword and format whether it holds; `SAMPLES` has a schema with each."""
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    row = re.search(r"^\| keywords \|.*?\n\|[-|]*\n(.*)`format`:(.*)\n.*\n(.*)$", page, re.M)
    held, formats, refused = (set(re.findall(r"`([\w$-]+)`", part)) for part in row.groups())
    for schema in (*(SAMPLES[name] for name in held), *({"type": "string", "format": name} for name in formats)):
        grammars.compile("json", schema)
    for name in refused - {"$ref"}:
        with pytest.raises(GrammarError):
            grammars.compile("json", SAMPLES[name])
    assert held | refused == SAMPLES.keys()
