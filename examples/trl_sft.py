"""Train a LoRA adapter under a schedule with TRL's SFTTrainer: attach, then train as ever.

    pip install . trl datasets
    python examples/trl_sft.py smollm2-135m train.jsonl tuned

Lines of the file have `prompt` and `completion`, TRL's own columns. With `completion_only_loss` the prompt's labels are
-100, from which the attached model knows the position of each response token. Packing puts several texts in one row and
is refused while attached. No recipe.json is written: `skipdecode generate` then needs `--no-template`.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from skipdecode import Schedule, attach
from skipdecode.models.checkpoint_schedule import ADAPTER_SCHEDULE_FILE
from skipdecode.models.loading.hub import load_model


def main(model: str, train: str, out: str, speedup: float = 2, seq_len: int = 48, **settings: float) -> SFTTrainer:
    """Train and save; the speed-up falls over `seq_len` new tokens, `settings` are further ones of SFTConfig."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN under a mask (pytorch issue 196678)
    loaded = load_model(model, dtype="float32")
    rows = [json.loads(line) for line in Path(train).read_text(encoding="utf-8").strip().split("\n")]
    schedule = Schedule.from_speedup(loaded.checkpoint.num_layers, speedup, seq_len=seq_len)
    given = {"max_steps": 100, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    given |= {"completion_only_loss": True, "bf16": False, "gradient_checkpointing": False}
    trainer = SFTTrainer(
        model=loaded.model,
        args=SFTConfig(f"{out}/trainer", **given | settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=loaded.tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.model.train()  # else attach warns that these weights were not tuned under the schedule
    with attach(trainer.model, schedule):
        trainer.train()

    trainer.model.save_pretrained(out)
    schedule.save(f"{out}/{ADAPTER_SCHEDULE_FILE}")  # so that load_model finds it
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:4])
