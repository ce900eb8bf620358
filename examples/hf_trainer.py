"""Train or fine-tune a causal language model on a text file, as transformers' run_clm.py does.

One line differs from a script for plain transformers: the import of Trainer.

    torchrun --nproc-per-node 2 examples/hf_trainer.py --model_name_or_path FOLDER \
        --train_file text.txt --output_dir out --do_train --do_eval --max_steps 100
"""

import math
from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from shardwise.integrations.transformers import Trainer  # was: from transformers import Trainer


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(metadata={"help": "a folder, or an id of the hub"})
    train_file: str = field(metadata={"help": "a text file"})
    block_size: int = field(default=32, metadata={"help": "tokens of a sample"})
    validation_percent: int = field(default=10, metadata={"help": "of the file, for evaluation"})


def main():
    script_args, training_args = HfArgumentParser(
        (ScriptArguments, TrainingArguments)
    ).parse_args_into_dataclasses()
    set_seed(training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(script_args.model_name_or_path)

    with training_args.main_process_first(desc="reading and tokenizing"):
        text = load_dataset("text", data_files=script_args.train_file, split="train")
        parts = text.train_test_split(script_args.validation_percent / 100, shuffle=False)
        tokens = parts.map(
            lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"]
        )

        def group(rows):
            """Blocks of block_size tokens, across the ends of lines."""
            ids = [token for row in rows["input_ids"] for token in row]
            size = script_args.block_size
            blocks = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
            return {"input_ids": blocks, "labels": blocks}

        columns = tokens["train"].column_names
        samples = tokens.map(group, batched=True, remove_columns=columns)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=samples["train"] if training_args.do_train else None,
        eval_dataset=samples["test"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )

    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
