#!/usr/bin/env bash
# Guess: whatever a JSON schema says, the constrained text is JSON; maxLength only limits the number of characters.
# Instead: xgrammar copies a pattern into the grammar without JSON escapes. A pattern with a quotation mark yields text that json.loads refuses. A string with maxLength can hold no escape at all, so no line break and no quotation mark.
# Versions: xgrammar 0.2.8.
# Users should: keep quotation marks and backslashes out of patterns, and leave maxLength out of schemas for free text and code.
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


def accepts(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return all(matcher.accept_token(token) for token in [*text.encode(), END])


print("xgrammar", version("xgrammar"))
quoted = {"type": "string", "pattern": '^"[a-z]+"$'}
seen = [accepts(quoted, '""abc""'), accepts(quoted, r'"\"abc\""'), accepts({"type": "string"}, r'"a\nb"'), accepts({"type": "string", "maxLength": 50}, r'"a\nb"')]
try:
    json.loads('""abc""')
except json.JSONDecodeError as error:
    print('pattern with quotation marks: accepts ""abc"":', seen[0], f"(json.loads: {error}); accepts the right form:", seen[1])
print("text with an escaped line break: plain string", seen[2], "| with maxLength 50:", seen[3])
assert seen == [True, False, True, False], "the behaviour has changed"
EOF
