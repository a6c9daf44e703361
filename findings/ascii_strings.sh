#!/usr/bin/env bash
# Guess: a string in a JSON schema, and a dot in a pattern, take every character that JSON and the pattern take, so an answer in French or Japanese can be written.
# Instead: lm-format-enforcer allows characters of its own list, which are ASCII. A model that wants to write "café" is stopped at "é" and forced to another token; no error and no warning. The standard's \u escapes are
# allowed, but a model hardly writes them.
# Matters to: whoever compares languages or decodes structured answers in one: scores of all languages but English fall by the decoder's doing, not the model's.
# Versions: lm-format-enforcer 0.11.3.
# Users should: give the parser a CharacterLevelParserConfig with an alphabet of the characters in their tokenizer's vocabulary.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'lm-format-enforcer==0.11.3'
venv/bin/python - <<'PY'
from importlib.metadata import version

from lmformatenforcer import CharacterLevelParserConfig, JsonSchemaParser, RegexParser
from lmformatenforcer.consts import COMPLETE_ALPHABET

print("lm-format-enforcer", version("lm-format-enforcer"))
schema = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}


def stop(parser, text):
    """The first character that the parser does not allow, or None if it allows the text."""
    for character in text:
        if character not in parser.get_allowed_characters():
            return character
        parser = parser.add_character(character)
    return None


stops = {text: stop(JsonSchemaParser(schema), f'{{"word":"{text}"}}') for text in ("cafe", "café", "naïve", "日本", r"caf\u00e9")}
pattern = stop(RegexParser(".+"), "café")
wide = CharacterLevelParserConfig(alphabet=COMPLETE_ALPHABET + "éï日本")
healed = [text for text in stops if stop(JsonSchemaParser(schema, wide), f'{{"word":"{text}"}}') is None]
print("JSON string, first character refused:", stops)
print("pattern .+ on café, first character refused:", pattern)
print("with a wider alphabet, allowed:", healed)
assert stops == {"cafe": None, "café": "é", "naïve": "ï", "日本": "日", r"caf\u00e9": None}, "the behaviour has changed"
assert len(healed) == 5 and pattern == "é", "the behaviour has changed"
PY
