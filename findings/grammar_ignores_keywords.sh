#!/usr/bin/env bash
# Guess: a JSON schema keyword that the grammar compiler cannot enforce is refused at compilation.
# Instead: xgrammar compiles schemas with not, uniqueItems, two parts of allOf, or bounds beside $ref, and then ignores those keywords. At most one line on stderr says so.
# Versions: xgrammar 0.2.8.
# Users should: validate every output against the schema, whatever the grammar promised, or choose a library that refuses.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' 'xgrammar==0.2.8'
venv/bin/python - <<'EOF'
import json
from importlib.metadata import version

import xgrammar

END = 256
tokens = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b"<end>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
compiler = xgrammar.GrammarCompiler(tokens)
integer = {"type": "integer"}
cases = [  # schema, text, whether the schema allows the text
    (integer | {"minimum": 5}, "1", False),
    ({"type": "string", "not": {"const": "a"}}, '"a"', False),
    ({"type": "array", "items": integer, "uniqueItems": True}, "[1,1]", False),
    ({"allOf": [integer | {"minimum": 5}, integer | {"maximum": 9}]}, "100", False),
    ({"$defs": {"a": integer}, "$ref": "#/$defs/a", "minimum": 5}, "1", False),
]
print("xgrammar", version("xgrammar"))
accepted = []
for schema, text, _ in cases:
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    accepted.append(all(matcher.accept_token(token) for token in [*text.encode(), END]))
    print(json.dumps(schema), "| invalid text", text, "accepted:", accepted[-1])
assert accepted == [False, True, True, True, True], "the behaviour has changed"
EOF
