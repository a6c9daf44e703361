r"""Train a LoRA adapter under a schedule with TRL's SFTTrainer: attach, then train as ever.

    pip install '.[tune,gguf]' trl datasets
    python examples/trl_sft.py smollm2-135m train.jsonl tuned --prompt-field mr --response-field ref --speedup 2

Prompt and completion columns with `completion_only_loss` give labels of -100 on the prompt, from which the attached
model knows the position of each response token. Packing puts several texts in one row and is refused while attached.
No recipe.json is written, so `skipdecode generate` is to be told the prompt, here `--prompt-template '{mr}\n'`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from skipdecode import Schedule, attach
from skipdecode.models.carried import SCHEDULE_FILE
from skipdecode.models.loading.hub import load_model


def main(argv: list[str] | None = None) -> SFTTrainer:
    """Train and save; returns the trainer."""
    args = parse(argv)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN under a mask (pytorch issue 196678)
    loaded = load_model(args.model, dtype="float32")
    records = [json.loads(line) for line in args.train.read_text(encoding="utf-8").splitlines()]
    rows = [{"prompt": r[args.prompt_field] + "\n", "completion": r[args.response_field]} for r in records]
    schedule = Schedule.from_speedup(loaded.model.config.num_hidden_layers, args.speedup, seq_len=args.seq_len)

    trainer = SFTTrainer(
        model=loaded.model,
        args=SFTConfig(
            output_dir=str(args.out / "trainer"),
            completion_only_loss=True,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=loaded.tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.model.train()  # else attach warns that these weights were not tuned under the schedule
    with attach(trainer.model, schedule):
        trainer.train()

    trainer.model.save_pretrained(args.out)
    schedule.save(args.out / SCHEDULE_FILE)  # so that load_model finds it
    return trainer


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("train", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompt-field", required=True)
    parser.add_argument("--response-field", required=True)
    parser.add_argument("--speedup", type=float, default=2.0)
    parser.add_argument("--seq-len", type=int, default=48)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
