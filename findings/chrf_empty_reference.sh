#!/usr/bin/env bash
# Guess: text where the reference is empty counts as a fault and lowers the corpus score, as with BLEU.
# Instead: chrF leaves out the pair. 3,000 letters against an empty reference cost nothing, so a model that never stops on unanswerable questions scores 100.
# Versions: sacrebleu 2.6.0.
# Users should: score lines with an empty reference apart, for example as exact match.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'sacrebleu==2.6.0'
venv/bin/python - <<'EOF'
import sacrebleu

print("sacrebleu", sacrebleu.__version__)
line = "the cat sat on the mat"
outputs, references = [line, "x y " * 750], [[line, ""]]
chrf, bleu = sacrebleu.corpus_chrf(outputs, references).score, sacrebleu.corpus_bleu(outputs, references).score
print(f"one right line and 3,000 letters for an empty reference: chrF {chrf:.1f}, BLEU {bleu:.1f}")
assert chrf > 99.9 and bleu < 10, "the behaviour has changed"
EOF
