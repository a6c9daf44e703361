#!/usr/bin/env bash
# Guess: packages named after ROUGE count n-grams as often as they occur, up to the count in the reference, so an output that loops loses precision: ten copies of the reference have precision 0.1.
# Instead: rouge takes sets by default. A reference repeated ten times scores 1.0 in ROUGE-1 and ROUGE-L. rouge_score counts.
# Matters to: whoever measures greedy decoding, pruned or early-exit models, which fail by looping: the score hides exactly this failure.
# Versions: rouge 1.0.1, rouge_score 0.1.2.
# Users should: pass exclusive=False, or use rouge_score, and report the length of outputs beside ROUGE.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'rouge==1.0.1' 'rouge_score==0.1.2'
venv/bin/python - <<'PY'
from importlib.metadata import version

from rouge import Rouge
from rouge_score.rouge_scorer import RougeScorer

print("rouge", version("rouge"), "rouge_score", version("rouge_score"))
reference = "a cat sat on the mat near an old door"
loop = " ".join([reference] * 10)
sets = Rouge().get_scores(loop, reference)[0]
counted = Rouge(exclusive=False).get_scores(loop, reference)[0]
other = RougeScorer(["rouge1", "rougeL"]).score(reference, loop)
rows = {
    "rouge": (sets["rouge-1"]["p"], sets["rouge-l"]["p"]),
    "rouge, exclusive=False": (counted["rouge-1"]["p"], counted["rouge-l"]["p"]),
    "rouge_score": (other["rouge1"].precision, other["rougeL"].precision),
}
for name, (first, longest) in rows.items():
    print(f"ten copies of the reference, {name}: precision of ROUGE-1 {first:.3f}, of ROUGE-L {longest:.3f}")
assert min(rows["rouge"]) > 0.999 and max(rows["rouge_score"]) < 0.101, "the behaviour has changed"
PY
