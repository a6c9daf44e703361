#!/usr/bin/env bash
# Guess: a text compared with itself has ROUGE 1.0.
# Instead: the default tokenizer replaces everything but a-z and 0-9 by a space. A Russian or Chinese text has no token and scores 0.0; "café über" equals "caf ber".
# Versions: rouge_score 0.1.2.
# Users should: pass tokenizer= with a tokenizer for their language, and compare one reference with itself first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'rouge_score==0.1.2'
venv/bin/python - <<'EOF'
from importlib.metadata import version

from rouge_score.rouge_scorer import RougeScorer

print("rouge_score", version("rouge_score"))
scorer = RougeScorer(["rouge1"])
pairs = [("good text", "good text"), ("пример текста", "пример текста"), ("很好的书", "很好的书"), ("café über", "caf ber")]
scores = [scorer.score(*pair)["rouge1"].fmeasure for pair in pairs]
for pair, score in zip(pairs, scores, strict=True):
    print(pair, "rouge1 =", score)
assert scores == [1.0, 0.0, 0.0, 1.0], "the behaviour has changed"
EOF
