"""The Llama-3 article's program, with one other import line, and its defects mended.

Behind each line that changed stands the article's, or the defect.
"""

import json
import sys

import torch
import transformers
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from shardwise.integrations.transformers import Trainer  # transformers.Trainer

# D16: no FullyShardedDataParallelPlugin, no Accelerator: the Trainer has its own
base_model_id, dataset_name, output_dir = sys.argv[1:]  # "meta-llama/Meta-Llama-3-8B", …
bnb_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_use_double_quant=True,
    bnb_4bit_quant_type="nf4",  # D12: fp4, by default
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = AutoModelForCausalLM.from_pretrained(  # D10: no device_map="auto"
    base_model_id, quantization_config=bnb_config, cache_dir=""
)
tokenizer = AutoTokenizer.from_pretrained(base_model_id, add_eos_token=True, add_bos_token=True)
dataset = load_dataset("text", data_files=dataset_name, split="train")
dataset = dataset.map(  # D13: the article passes text to the Trainer
    lambda row: tokenizer(row["text"] + tokenizer.eos_token, truncation=True, max_length=32),
    remove_columns=["text"],
)

model.gradient_checkpointing_enable()
model = prepare_model_for_kbit_training(model)
config = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules=[
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",  # D11: "w1"
        "up_proj",  # "w2"
        "down_proj",  # "w3"
        "lm_head",
    ],
    bias="none",
    lora_dropout=0.05,
    task_type="CAUSAL_LM",
)
model = get_peft_model(model, config)  # type: ignore[assignment]
# D16: no accelerator.prepare_model(model)
# D14: no tokenizer.pad_token = tokenizer.eos_token, where the tokenizer has one

trainer = Trainer(
    model=model,
    train_dataset=dataset,
    args=transformers.TrainingArguments(
        output_dir=output_dir,
        warmup_steps=2,
        per_device_train_batch_size=4,  # 16
        gradient_checkpointing=True,
        gradient_accumulation_steps=2,  # 8
        max_steps=6,  # num_train_epochs=3
        learning_rate=2.5e-3,  # 2.5e-5
        logging_steps=1,
        bf16=True,  # D12: fp16, while 4-bit weights computed in bf16
        optim="paged_adamw_8bit",
        # D18: no logging_dir
        save_strategy="steps",
        save_steps=2,  # 100
        save_total_limit=2,
        use_cpu=True,  # to rehearse it
    ),
    data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
model.config.use_cache = False
trainer.train()
if trainer.is_world_process_zero():
    sys.stdout.write(
        json.dumps([line["loss"] for line in trainer.state.log_history if "loss" in line]) + "\n"
    )
