"""Supervised fine-tuning of an adapter on conversations, as TRL's examples do.

One line differs from a script for plain TRL: the import of SFTTrainer.

    torchrun --nproc-per-node 2 examples/trl_sft.py --model_name_or_path FOLDER \
        --dataset_name chats.jsonl --output_dir out --use_peft --max_steps 100
"""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser, get_peft_config

from shardwise.integrations.trl import SFTTrainer  # was: from trl import SFTTrainer


def main(script_args, training_args, model_args):
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    dataset = load_dataset("json", data_files=script_args.dataset_name, split="train")

    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    main(*parser.parse_args_and_config())
