#!/usr/bin/env bash
# Guess: DecodeStream takes every sequence of ids that decode() takes; a model can emit any id.
# Instead: with byte fallback (Llama 2, Gemma) an invalid byte after valid ones changes the text already given out, and the next token raises a plain Exception. decode() of the same ids gives replacement characters.
# Versions: tokenizers 0.23.3.
# Users should: catch the exception for each stream, make a new DecodeStream and go on, so that one row's bytes do not end a whole batch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'tokenizers==0.23.3'
venv/bin/python - <<'EOF'
import tokenizers
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

print("tokenizers", tokenizers.__version__)
vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "a": 257}
tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
raised = []
for ids in ([0xC3, 0xA9, 257], [0xC3, 0xA9, 0xFF, 257]):
    stream, pieces, error = DecodeStream(), [], None
    for token in ids:
        try:
            pieces.append(stream.step(tokenizer, token))
        except Exception as problem:
            error = str(problem)
    raised.append(error is not None)
    print(ids, "decode:", repr(tokenizer.decode(ids)), "stream:", pieces, "error:", error)
assert raised == [False, True], "the behaviour has changed"
EOF
