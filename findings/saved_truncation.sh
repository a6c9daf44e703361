#!/usr/bin/env bash
# Guess: truncation and padding are arguments of one call; a saved tokenizer does not know the last call.
# Instead: the call sets them on the tokenizer, and save_pretrained writes them into tokenizer.json. Programs that read the file with the tokenizers library, or a Rust server, cut every text to that length and pad every short one.
# AutoTokenizer resets them at its next call, so a test with transformers alone sees nothing.
# Versions: transformers 5.23.0, tokenizers 0.23.3.
# Users should: call the tokenizer once without truncation and padding before save_pretrained, or set "truncation" and "padding" in tokenizer.json to null.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'tokenizers==0.23.3' 'transformers==5.23.0'
venv/bin/python - <<'EOF'
import tokenizers
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", "<pad>", *"abcdef"])}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>")
text = "a b c d e f"
tokenizer(text, truncation=True, padding="max_length", max_length=3)
tokenizer.save_pretrained("saved")
plain = Tokenizer.from_file("saved/tokenizer.json")
cut, padded, auto = plain.encode(text).ids, plain.encode("a").ids, AutoTokenizer.from_pretrained("saved")(text)["input_ids"]
print("six words, tokenizers:", cut, "| one word, tokenizers:", padded, "| six words, AutoTokenizer:", auto)
tokenizer(text)
tokenizer.save_pretrained("again")
healed = Tokenizer.from_file("again/tokenizer.json").encode(text).ids
print("saved after a plain call:", healed)
assert len(cut) == len(padded) == 3 and len(auto) == len(healed) == 6, "the behaviour has changed"
EOF
