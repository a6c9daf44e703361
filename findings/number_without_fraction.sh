#!/usr/bin/env bash
# Guess: a guide allows each token that some match of the pattern needs.
# Instead: once the text is a full match, outlines_core offers only tokens after which the text is a full match again. For a|abc the text abc can never come, and a JSON number at top level can have no fraction: after 3 there is no dot. Inside an object the dot is offered.
# Versions: outlines_core 0.2.14.
# Users should: wrap a number in an object or close the pattern with a fixed character, so that no full match is the beginning of another.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'outlines_core==0.2.14'
venv/bin/python - <<'EOF'
import json
from importlib.metadata import version

from outlines_core import Guide, Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

CHARACTERS = 'abc0123456789.-eE+{}": x'
vocabulary = Vocabulary(999, {character: [i] for i, character in enumerate(CHARACTERS)})


def after(pattern, text):
    guide = Guide(Index(pattern, vocabulary))
    for character in text:
        guide.advance(CHARACTERS.index(character))
    return ["END" if token == 999 else CHARACTERS[token] for token in sorted(guide.get_tokens())]


print("outlines_core", version("outlines_core"))
number = build_regex_from_schema(json.dumps({"type": "number"}))
inside = build_regex_from_schema(json.dumps({"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}))
offers = [after("a|abc", "a"), after("(a|abc)x", "a"), after(number, "3"), after(inside, '{"x":3')]
for name, offer in zip(("a|abc after a", "(a|abc)x after a", "number after 3", 'object after {"x":3'), offers, strict=True):
    print(f"{name}: {offer}")
assert ["b" in offers[0], "b" in offers[1], "." in offers[2], "." in offers[3]] == [False, True, False, True], "the behaviour has changed"
EOF
