#!/usr/bin/env bash
# Guess: a token that llguidance allows can be taken, and an added token that the tokenizer calls not special is text, such as Qwen's <tool_call>.
# Instead: llguidance takes every added token in angle brackets for a special one. Where a grammar forces its text, the mask has this token alone, consume_token refuses it, and the matcher has ended.
# Versions: llguidance 1.9.1, tokenizers 0.22.2.
# Users should: write such a token by its number, <[3]>, in a Lark grammar, or rename it before LLTokenizer reads the tokenizer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'llguidance==1.9.1' 'tokenizers==0.22.2'
venv/bin/python - <<'EOF'
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

letters = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["</s>"])
tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
number = tokenizer.token_to_id("<tool_call>")
words = LLTokenizer(tokenizer.to_str(), tokenizer.get_vocab_size(), [0])
print("llguidance", version("llguidance"), "| special:", words.is_special_token(number))
found = []
for grammar in ('start: "<tool_call>\\n{}"', f'start: <[{number}]> "\\n{{}}"'):
    matcher = LLMatcher(words, LLMatcher.grammar_from_lark(grammar), log_level=0)
    mask = matcher.compute_bitmask()
    allowed = [token for token in range(number + 1) if mask[token // 8] >> (token % 8) & 1]
    found.append((allowed, matcher.consume_token(number)))
    print(grammar, "| allowed:", allowed, "| taken:", found[-1][1])
assert found == [([number], False), ([number], True)], "the behaviour has changed"
EOF
