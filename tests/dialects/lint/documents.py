"""The documents' programs and options, shortened to what a defect needs; each marks its own.

A mark at the end of a line is no part of the document: ``D3 D18`` after ``#``.
"""

from __future__ import annotations

import re

MARK = re.compile(r"  # ((?:D\d+ ?)+)$")

DOCUMENTS = {
    "fsdp_example.py": """\
import argparse
import os
import torch
import torch.nn as nn
from torch.nn import Linear
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import habana_frameworks.torch.distributed.hccl

os.environ["PT_HPU_LAZY_MODE"] = "0"  # D6

device_hpu = torch.device('hpu')


def setup(rank, world_size):
    os.environ['MASTER_ADDR'] = 'localhost'
    dist.init_process_group(backend='hccl', rank=rank, world_size=world_size)


class ToyModel(nn.Module):
    def __init__(self):
        super(ToyModel, self).__init__()
        self.lin1 = Linear(3, 3, bias=False)  # D8


def simple_demo(rank, world_size, args):
    setup(rank, world_size)
    model = ToyModel().to(device_hpu)
    model = FSDP(model, device_id = device_hpu)
    for i in range(args.iterations):
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description='Simple_demo Example')
    parser.add_argument('--iterations', type=int, default=5, help='iterations (default: 5)')
    parser.add_argument('--ws', type=int, default=2, help='world size (default: 2)')
    parser.add_argument("-v", "--verbose", action="store_true", help="Enable verbosity")

    args = parser.parse_args()
    if args.verbose:
        os.environ["TORCH_CPP_LOG_LEVEL"]="INFO"
    mp.spawn(simple_demo, args=(args.ws, args), nprocs=args.ws, join=True)
""",
    "gaudi.txt": """\
The Gaudi relevant changes to the code are:

  • Line 12 — Enable Eager mode: os.environment["PT_HPU_LAZY_MODE"] = "0"  # D7
  • Line 36 — Target FSDP execution with Gaudi model = FSDP(model,device_id = device+hpu)  # D7

Note that if you want to use all 8 Gaudi cards, you must provide the —ws 8 (world size) flag.  # D7
""",
    "finetune.sh": """\
cd ~/optimum-habana/examples/language-modeling
pip install -r requirements.txt
LOWER_LIST=ops_bf16.txt PT_HPU_LAZY_MODE=0 \\
python3 ../gaudi_spawn.py --world_size 8 --use_mpi run_lora_clm.py \\
  --model_name_or_path meta-llama/Llama-2-70b-hf \\
  --dataset_name tatsu-lab/alpaca \\
  --bf16 True \\
  --output_dir ./lora_out \\
  --max_seq_len 2048 \\  # D5
  --gradient_checkpointing \\
  --per_device_train_batch_size 5 \\
  --save_strategy no \\
  --learning_rate 0.0004 \\
  --warmup_ratio 0.03 \\  # D3 D18
  --lr_scheduler_type "constant" \\
  --logging_steps 1 \\
  --dataset_concatenation \\
  --do_train \\
  --use_habana \\
  --throughput_warmup_steps 3 \\
  --lora_rank 4 \\
  --lora_target_modules "q_proj" "v_proj" "k_proj" "o_proj" \\
  --attn_softmax_bf16 True \\
  --validation_split_percentage 4 \\
  --use_lazy_mode False \\
  --fsdp_config fsdp_config.json \\
  --fsdp auto_wrap \\
  --num_train_epochs 2 \\
  --evaluation_strategy epoch \\  # D18
  --per_device_eval_batch_size 1 \\
  --eval_delay 2 \\  # D4
  --do_eval \\
  --pipelining_fwd_bwd False \\
  --use_fused_rope False \\
  --torch_compile_backend hpu_backend \\
  --torch_compile \\
  --gradient_accumulation_steps 2
""",
    "fsdp_config.json": """\
{
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",  # D2
    "fsdp_forward_prefetch": false,  # D2
    "fsdp_offload_params": false,  # D1 D2
    "fsdp_sharding_strategy": 1,  # D1 D2
    "fsdp_state_dict_type": "FULL_STATE_DICT",  # D1
    "fsdp_sync_module_states": true,  # D2
    "fsdp_use_orig_params": true,  # D2
    "transformer_layer_cls_to_wrap": "GaudiLlamaDecoderLayer",
    "fsdp_activation_checkpointing": false
}
""",
    "run.py": """\
import torch
import transformers
from transformers import AutoTokenizer, AutoModelForCausalLM, BitsAndBytesConfig
from datasets import load_dataset
from accelerate import FullyShardedDataParallelPlugin, Accelerator
from peft import prepare_model_for_kbit_training, LoraConfig, get_peft_model

fsdp_plugin = FullyShardedDataParallelPlugin(
    state_dict_config=FullStateDictConfig(offload_to_cpu=True, rank0_only=False),  # D17
    optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=False),  # D17
)
accelerator = Accelerator(fsdp_plugin=fsdp_plugin)
base_model_id = "meta-llama/Meta-Llama-3-8B"
bnb_config = BitsAndBytesConfig(
    load_in_4bit=True,  # D9 D12
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16
)
model = AutoModelForCausalLM.from_pretrained(base_model_id,
    quantization_config=bnb_config,
    device_map="auto",  # D10
    cache_dir='')
tokenizer = AutoTokenizer.from_pretrained(
    base_model_id,
    add_eos_token=True,
    add_bos_token=True,
)
dataset_name = "hf_dataset"
dataset = load_dataset(dataset_name, split="train")
model.gradient_checkpointing_enable()
model = prepare_model_for_kbit_training(model)
config = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3", "lm_head"],  # D11
    bias="none",
    lora_dropout=0.05,
    task_type="CAUSAL_LM",
)
model = get_peft_model(model, config)
model = accelerator.prepare_model(model)  # D16
if torch.cuda.device_count() > 1:
    model.is_parallelizable = True
    model.model_parallel = True
tokenizer.pad_token = tokenizer.eos_token  # D14
trainer = transformers.Trainer(
    model=model,
    train_dataset=dataset,  # D13
    args=transformers.TrainingArguments(
        output_dir='./results',
        warmup_steps=2,
        per_device_train_batch_size=16,
        gradient_checkpointing=True,
        gradient_accumulation_steps=8,
        num_train_epochs=3,
        learning_rate=2.5e-5,
        logging_steps=1,
        fp16=True,  # D12
        optim="paged_adamw_8bit",  # D15
        logging_dir="./logs",  # D18
        save_strategy="steps",
        save_steps=100,
        save_total_limit=2,
    ),
    data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
model.config.use_cache = False
trainer.train()
""",
    "slurm.txt": "srun accelerate launch run.py  # D19\n",
    "FSDP_mnist_xpu.py": """\
import argparse
import functools
import torch
import intel_extension_for_pytorch  # D24
import oneccl_bindings_for_pytorch  # D24
from torchvision import datasets, transforms
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data.distributed import DistributedSampler
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def setup(rank, world_size):
    dist.init_process_group("ccl", rank=rank, world_size=world_size)


def fsdp_main(rank, world_size, args):
    setup(rank, world_size)
    dataset1 = datasets.MNIST('../data', train=True, download=True, transform=transform)  # D23
    dataset2 = datasets.MNIST('../data', train=False, transform=transform)
    sampler1 = DistributedSampler(dataset1, rank=rank, num_replicas=world_size, shuffle=True)
    sampler2 = DistributedSampler(dataset2, rank=rank, num_replicas=world_size)  # D22
    train_kwargs = {'batch_size': args.batch_size, 'sampler': sampler1}
    test_kwargs = {'batch_size': args.test_batch_size, 'sampler': sampler2}
    my_auto_wrap_policy = functools.partial(  # D20
        size_based_auto_wrap_policy, min_num_params=100
    )
    model = FSDP(model, device_id="xpu:{}".format(rank))
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        sampler1.set_epoch(epoch)
        train(args.lr)
    if rank == 0:
        print(f"event: {init_start_event.elapsed_time(init_end_event) / 1000}sec")  # D23
    if args.save_model:
        dist.barrier()


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description='PyTorch MNIST Example')
    parser.add_argument('--batch-size', type=int, default=64, metavar='N',
                        help='input batch size for training (default: 64)')
    parser.add_argument('--test-batch-size', type=int, default=1000, metavar='N',
                        help='input batch size for testing (default: 1000)')
    parser.add_argument('--epochs', type=int, default=10, metavar='N',  # D21
                        help='number of epochs to train (default: 14)')
    parser.add_argument('--lr', type=float, default=1.0, help='learning rate (default: 1.0)')
    parser.add_argument('--gamma', type=float, default=0.7, help='gamma (default: 0.7)')
    parser.add_argument('--no-cuda', action='store_true', default=False, help='disables')  # D21
    parser.add_argument('--seed', type=int, default=1, help='random seed (default: 1)')
    parser.add_argument('--save-model', action='store_true', default=False, help='For Saving')
    args = parser.parse_args()
    torch.manual_seed(args.seed)  # D21
    mp.spawn(fsdp_main, args=(torch.xpu.device_count(), args), join=True)
""",
    "train_multi_gpu.py": """\
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, LlamaForCausalLM

GLOBAL_BATCH_SIZE = 128
MICRO_BATCH_SIZE = 8
GRAD_ACCUMULATION_STEPS = GLOBAL_BATCH_SIZE // MICRO_BATCH_SIZE  # D26


def main():
    model = LlamaForCausalLM.from_pretrained("PrimeIntellect/llama-150m-fresh")
    model = model.to("cuda")  # D30
    model = FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))  # D27
    tokenizer = AutoTokenizer.from_pretrained("mistralai/Mistral-7B-v0.1", use_fast=True)
    tokenizer.pad_token = "</s>"  # D14
    data_collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)
    for step, batch in enumerate(iterable=train_loader):
        is_accumulating = step % GRAD_ACCUMULATION_STEPS == 0  # D25
        with model.no_sync() if is_accumulating else nullcontext():
            loss = model(**batch).loss / GRAD_ACCUMULATION_STEPS
            loss.backward()
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    init_process_group(backend="nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    main()
    destroy_process_group()
""",
    "thunder_fsdp.py": """\
import torch
import torch.distributed
import thunder  # D29
import thunder.distributed

device='cuda'  # D30
world_size = 2  # We have two processes.
global_rank = 0
options = torch.distributed.distributed_c10d.ProcessGroup.Options(backend="nccl")
process_group = torch.distributed.distributed_c10d.ProcessGroup(  # D29
    torch.distributed.distributed_c10d.Store(), global_rank, world_size, options)


def model_with_syncs(x, *params):
    unsharded_params = []
    for param in params:
        unsharded_params.append(thunder.distributed.prims.synchronize(param, process_group))  # D29
    return functional_forward(x, *unsharded_params)


cmodel = thunder.jit(thunder.distributed.fsdp(model))  # D29
""",
}

REPAIRED = {
    "fsdp_config.json": """\
{
    "version": 1,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "sharding_strategy": "FULL_SHARD",
    "backward_prefetch": "BACKWARD_PRE",
    "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"
}
""",
    "accelerate.yaml": """\
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_offload_params: false}
""",
    "finetune.sh": """\
torchrun --nproc-per-node 8 run_lora_clm.py --max_seq_length 2048 --eval_delay 1 \\
  --warmup_steps 0.03 --lr_scheduler_type constant_with_warmup \\
  --eval_strategy epoch --num_train_epochs 2 --fsdp "full_shard auto_wrap"
srun sh -c 'accelerate launch --machine_rank $SLURM_NODEID run.py'
""",
    "run.py": """\
import transformers
bnb_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.bfloat16,
    bnb_4bit_quant_storage=torch.bfloat16,
)
model = AutoModelForCausalLM.from_pretrained("Llama", quantization_config=bnb_config)
dataset = load_dataset("text", split="train")
dataset = dataset.map(tokenize)
config = LoraConfig(target_modules=["q_proj", "gate_proj"])
tokenizer.add_special_tokens({"pad_token": "<pad>"})
trainer = transformers.Trainer(
    train_dataset=dataset,
    args=transformers.TrainingArguments(bf16=True, warmup_steps=2, optim="adamw_torch", fsdp=True),
    data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
plugin = FullyShardedDataParallelPlugin(
    state_dict_config=FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
)
""",
    "pretrain.py": """\
import os
os.environ["PT_HPU_LAZY_MODE"] = "0"
import habana_frameworks.torch
from transformers import LlamaForCausalLM
from torch.distributed import init_process_group

GRAD_ACCUMULATION_STEPS = GLOBAL_BATCH_SIZE // MICRO_BATCH_SIZE // world_size
device = "cuda" if torch.cuda.is_available() else "cpu"


def worker(rank, args):
    torch.manual_seed(args.seed)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    model = FSDP(LlamaForCausalLM(config), auto_wrap_policy=policy)
    model.head = Linear(3, 4)
    if rank == 0:
        datasets.MNIST("../data", train=True, download=True)
    sampler = DistributedSampler(dataset1)
    end.synchronize()
    seconds = start.elapsed_time(end)
    is_accumulating = (step + 1) % G != 0
    with model.no_sync() if is_accumulating else nullcontext():
        model(batch)


parser.add_argument("--seed", type=int, default=1, help="random seed (default: 1)")
parser.add_argument("--ws", type=int, default=2)
torch.manual_seed(args.seed)
mp.spawn(worker, args=(args,), nprocs=args.ws)
""",
}
