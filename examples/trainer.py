"""Train under a schedule with transformers' own Trainer: attach, then train as ever.

    pip install .
    python examples/trainer.py smollm2-135m train.jsonl tuned

Lines of the file have `prompt` and `response`. Labels of -100 mark the prompt, as in any completion-only training; from
them the attached model knows the position of each response token. No recipe.json is written, so `skipdecode generate`
needs `--prompt-template '{prompt}\\n'`. `skipdecode tune` does the same with aligned batches, which skip more, and with
a teacher.
"""

import sys

import torch
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from skipdecode import Schedule, attach
from skipdecode.data.examples import encode_examples
from skipdecode.data.source import read_file
from skipdecode.data.template import PromptTemplate
from skipdecode.models.loading.hub import load_model

TEMPLATE = PromptTemplate("{prompt}\n", ("response",))


def main(model: str, train: str, out: str, speedup: float = 2, **settings: float) -> Trainer:
    """Train and save; `settings` are further ones of TrainingArguments. Returns the trainer."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN under a mask (pytorch issue 196678)
    loaded = load_model(model, dtype="float32")
    examples, _ = encode_examples(read_file(train, TEMPLATE), TEMPLATE, loaded.tokenizer)
    rows = [
        {"input_ids": [*e.prompt, *e.response], "labels": [-100] * len(e.prompt) + list(e.response)} for e in examples
    ]
    longest = max(len(e.response) for e in examples)
    schedule = Schedule.from_speedup(loaded.checkpoint.num_layers, speedup, seq_len=longest)
    given = {"max_steps": 100, "learning_rate": 3e-4, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    trainer = Trainer(
        model=loaded.model.train(),  # else attach warns that these weights were not tuned under the schedule
        args=TrainingArguments(f"{out}/trainer", **given | settings),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(loaded.tokenizer, label_pad_token_id=-100),
    )
    with attach(loaded.model, schedule):
        trainer.train()

    loaded.model.config.skipdecode = schedule.to_dict()  # so that attach(model) finds it
    loaded.model.save_pretrained(out)
    loaded.tokenizer.save_pretrained(out)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:4])
