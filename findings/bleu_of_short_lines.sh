#!/usr/bin/env bash
# Guess: corpus BLEU of an output that equals its reference is 100.
# Instead: corpus_bleu gives 0.0 when no line has four tokens, because no 4-gram exists. A line of Japanese is one token, so a perfect Japanese corpus gets 0.0. One longer line brings 100. sentence_bleu gives 100 for the same line.
# Versions: sacrebleu 2.6.0.
# Users should: pass tokenize="char" or "zh" for text without spaces, and effective_order=True (or chrF) for very short answers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'sacrebleu==2.6.0'
venv/bin/python - <<'EOF'
import sacrebleu

print("sacrebleu", sacrebleu.__version__)
short, long, japanese = "thank you", "the cat sat on the mat", "これは良い本です"
scores = {
    "50 short lines": sacrebleu.corpus_bleu([short] * 50, [[short] * 50]).score,
    "with one longer line": sacrebleu.corpus_bleu([short] * 50 + [long], [[short] * 50 + [long]]).score,
    "50 Japanese lines": sacrebleu.corpus_bleu([japanese] * 50, [[japanese] * 50]).score,
    "Japanese, tokenize=char": sacrebleu.corpus_bleu([japanese] * 50, [[japanese] * 50], tokenize="char").score,
    "sentence_bleu of one short line": sacrebleu.sentence_bleu(short, [short]).score,
}
for name, score in scores.items():
    print(f"identical output, {name}: {score:.1f}")
assert [round(score) for score in scores.values()] == [0, 100, 0, 100, 100], "the behaviour has changed"
EOF
