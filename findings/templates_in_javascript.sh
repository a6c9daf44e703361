#!/usr/bin/env bash
# Guess: a chat template gives the same text in transformers (Jinja2, Python) and in @huggingface/jinja (transformers.js, JavaScript), or the JavaScript one refuses what it does not know.
# Instead: lstrip and rstrip ignore their argument, so lstrip('\n') also takes the indentation of code off an answer; a value that is true prints as "true", null as nothing, a dictionary with double quotes, 1.0 as 1, and two equal
# lists are unequal. Nothing is refused.
# Matters to: whoever trains or measures a model in Python and serves it to a browser: the prompt has other tokens there, most of all after reasoning (templates strip newlines around it) and with tools.
# Versions: @huggingface/jinja 0.5.11, transformers 5.24.0.
# Users should: render their own conversations with both and compare the texts; in a template write tojson for every value that is not text, and no argument that strips.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'transformers==5.24.0' 'jinja2==3.1.6'
npm install --silent --no-audit --no-fund --prefix . '@huggingface/jinja@0.5.11' > npm.log
cat > render.mjs <<'JS'
import { readFileSync } from "node:fs";
import { Template } from "@huggingface/jinja";

const cases = JSON.parse(readFileSync("cases.json", "utf8"));
console.log(JSON.stringify(cases.map(([template, messages]) => new Template(template).render({ messages }))));
JS
venv/bin/python - <<'PY' 2> python.log || { tail -n 3 python.log; exit 1; }
import json
import subprocess

import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x")))
code = [{"role": "assistant", "content": "<think>Short.</think>\n    return 1\n"}]
call = [{"role": "assistant", "content": "", "arguments": {"exact": True, "limit": 1.0, "sort": None}}]
cases = {
    "indentation after reasoning": ("{{ messages[0].content.split('</think>')[-1].lstrip('\\n') }}", code),
    "spaces before a line end": ("{{ ('a  ' + '\\n').rstrip('\\n') }}|", code),
    "arguments": ("{{ messages[0].arguments }}", call),
    "one argument": ("{{ messages[0].arguments.exact }}", call),
    "an empty argument": ("{{ messages[0].arguments['sort'] }}|", call),
    "equal lists": ("{% if ['text'] == ['text'] %}equal{% else %}unequal{% endif %}", code),
}
with open("cases.json", "w") as file:
    json.dump(list(cases.values()), file)
ran = subprocess.run(["node", "render.mjs"], capture_output=True, text=True, check=True)
print("transformers", transformers.__version__, "@huggingface/jinja 0.5.11")
found = {}
for (name, (template, messages)), javascript in zip(cases.items(), json.loads(ran.stdout), strict=True):
    python = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    found[name] = (python, javascript)
    print(f"{name}: Python {python!r}, JavaScript {javascript!r}")
assert found == {
    "indentation after reasoning": ("    return 1\n", "return 1\n"),
    "spaces before a line end": ("a  |", "a|"),
    "arguments": ("{'exact': True, 'limit': 1.0, 'sort': None}", '{"exact": true, "limit": 1, "sort": null}'),
    "one argument": ("True", "true"),
    "an empty argument": ("None|", "|"),
    "equal lists": ("equal", "unequal"),
}, "the behaviour has changed"
PY
