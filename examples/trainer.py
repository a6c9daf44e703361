r"""Train under a schedule with transformers' own Trainer: attach, then train as ever.

    pip install '.[tune,gguf]'
    python examples/trainer.py smollm2-135m train.jsonl tuned --prompt-template '{mr}' --response-field ref --speedup 2

Labels of -100 mark the prompt, as in any completion-only training; from them the attached model knows the position of
each response token. No recipe.json is written, so `skipdecode generate` is to be told the prompt, here by
`--prompt-template '{mr}\n'`. `skipdecode tune` does the same with aligned batches, which skip more, and with a teacher.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from skipdecode import Schedule, attach
from skipdecode.data.examples import encode_examples, read_file
from skipdecode.data.records import Template
from skipdecode.models.loading.hub import load_model


def main(argv: list[str] | None = None) -> Trainer:
    """Train and save; returns the trainer."""
    args = parse(argv)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN under a mask (pytorch issue 196678)
    loaded = load_model(args.model, dtype="float32")
    template = Template(args.prompt_template + "\n", args.response_field)
    examples, _ = encode_examples(read_file(args.train, template), template, loaded.tokenizer)
    rows = [
        {"input_ids": [*e.prompt, *e.response], "labels": [-100] * len(e.prompt) + list(e.response)} for e in examples
    ]
    model = loaded.model.train()
    longest = max(len(e.response) for e in examples)
    schedule = Schedule.from_speedup(model.config.num_hidden_layers, args.speedup, seq_len=longest)

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.out / "trainer"),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(loaded.tokenizer, label_pad_token_id=-100),
    )
    model.train()  # else attach warns that these weights were not tuned under the schedule
    with attach(model, schedule):
        trainer.train()

    model.config.skipdecode = schedule.to_dict()  # so that attach(model) finds it
    model.save_pretrained(args.out)
    loaded.tokenizer.save_pretrained(args.out)
    return trainer


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("train", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompt-template", required=True)
    parser.add_argument("--response-field", required=True)
    parser.add_argument("--speedup", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
