"""Suggests keys for an unknown one: by a table of other trainers' names, then by spelling.

Spelling alone takes ``learning_rate`` for ``sharding.strategy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from shardwise.errors.synonyms import OTHER_NAMES, option_key

MIN_SIMILARITY = 2 / 3  # of 1; less similar keys are not suggested
MAX_GAP = 0.1  # below the highest similarity

_WORDS = {
    "model.width": "hidden_size d_model dim n_embd n_embed embed_dim embedding_dim hidden_dim "
    "embedding_size d_embed model_dim",
    "model.layers": "num_hidden_layers n_layer n_layers num_layers depth num_blocks",
    "model.heads": "num_attention_heads n_head n_heads num_heads attention_heads",
    "model.kv_heads": "num_key_value_heads n_kv_heads num_kv_heads n_kv_head",
    "model.hidden": "intermediate_size ffn_size ffn_dim ffn_hidden_size d_ff mlp_dim",
    "model.tied": "tie_word_embeddings tie_embeddings tied_embeddings weight_tying",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layernorm_epsilon",
    "model.rope_theta": "rope_base rotary_base",
    "tokenizer.vocabulary": "vocab_size vocabulary_size vocab n_vocab",
    "data.format": "dataset_format conversation_format chat_format",
    "data.packing": "sample_packing dataset_concatenation pack_dataset",
    "data.loss_on": "train_on_inputs train_on_input completion_only_loss assistant_only_loss",
    "data.split": "dataset_split train_split",
    "data.columns": "dataset_columns column_mapping",
    "data.validation_source": "validation_file eval_dataset eval_file",
    "data.source": "dataset datasets data_path data_dir dataset_path train_file corpus",
    "data.field": "text_field text_column dataset_text_field content_field",
    "data.validation": "val_split val_set_size validation_split test_size val_size "
    "validation_split_percentage",
    "data.context": "seq_len max_seq_len seq_length max_seq_length sequence_length sequence_len "
    "max_length block_size context_length context_size max_position_embeddings n_ctx n_positions "
    "max_sequence_length",
    "batch.rows": "batch_size global_batch_size train_batch_size total_batch_size",
    "batch.micro": "micro_batch_size per_device_train_batch_size per_device_batch_size "
    "device_batch_size local_batch_size train_micro_batch_size_per_gpu mbs",
    "batch.rows batch.micro": "gradient_accumulation_steps grad_accum accumulation accumulate "
    "accumulation_steps accumulate_grad_batches gradient_accumulation",
    "optimizer.lr": "max_lr peak_lr base_lr",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler scheduler",
    "optimizer.warmup": "warmup_steps warmup_iters num_warmup_steps lr_warmup_steps warmup_ratio",
    "optimizer.floor": "min_lr min_lr_ratio lr_min final_lr_ratio lr_min_ratio min_learning_rate",
    "optimizer.betas": "adam_beta1 adam_beta2 adam_betas momentum",
    "optimizer.eps": "adam_epsilon adam_eps",
    "optimizer.weight_decay": "decay",
    "optimizer.clip": "grad_clip max_grad_norm clip_grad clip_grad_norm gradient_clipping "
    "gradient_clip_val max_norm gradient_clip",
    "optimizer.loss_scale": "init_scale initial_scale grad_scaler initial_scale_power",
    "sharding.sync_each_micro_batch": "sync_each_batch no_sync",
    "checkpoint.save_every": "save_steps save_interval save_freq checkpoint_interval "
    "checkpoint_every ckpt_interval checkpointing_steps checkpoint_freq",
    "checkpoint.save_total_limit": "keep_last max_checkpoints keep_last_k keep_n keep",
    "checkpoint.keep_best": "load_best_model_at_end save_best save_best_only",
    "checkpoint.asynchronous": "async async_save async_checkpoint async_mode",
    "checkpoint.resume": "resume_from_checkpoint resume_from restore load_from init_from ckpt_path "
    "load_checkpoint checkpoint_path",
    "sample.prompt": "prompts",
    "sample.tokens": "max_new_tokens max_tokens num_tokens sample_length",
    "run.folder": "output_dir out_dir save_dir output out run_dir logging_dir log_dir work_dir "
    "output_path checkpoint_dir",
    "run.overwrite": "overwrite_output_dir force overwrite_output",
    "run.device": "accelerator use_cpu no_cuda",
    "run.steps": "max_steps num_steps train_steps training_steps max_iters max_iterations "
    "iterations num_iterations total_steps n_steps train_iters iters",
    "run.epochs": "num_epochs num_train_epochs max_epochs n_epochs",
    "run.patience": "early_stopping_patience early_stopping",
    "run.throughput_warmup": "throughput_warmup_steps",
    "run.seed": "random_seed manual_seed",
    "run.log_every": "logging_steps log_interval log_freq log_steps log_every_n_steps",
    "run.eval_every": "eval_steps eval_interval val_interval evaluation_steps val_check_interval "
    "validation_interval eval_freq val_every validate_every eval_strategy evaluation_strategy",
    "run.eval_rows": "eval_iters eval_batches limit_val_batches max_eval_samples eval_samples",
    "--nproc": "n np nprocs nproc_per_node num_processes processes num_procs gpus num_gpus ranks "
    "world_size workers ngpu ngpus nprocs_per_node devices",
    "--restarts": "restart max_restarts retries max_retries",
}
SYNONYMS = {
    last_word: tuple(keys.split())
    for keys, last_words in _WORDS.items()
    for last_word in last_words.split()
}


def suggestions(name: str, known: Sequence[str]) -> list[str]:
    """Keys of ``known`` to suggest for an unknown ``name``, the most similar first.

    Args:
        name: a key such as ``model.hidden_size`` or ``hidden_size``, or an option.
        known: keys, and options with their dashes.
    """
    last_word, section = _last_word(name), name.rpartition(".")[0]
    last_words = last_word, OTHER_NAMES.get(last_word)
    meant = [*SYNONYMS.get(last_word, ()), f"sharding.{option_key(last_word)}"]
    meant += [key for key in known if _last_word(key) in last_words]
    if synonyms := [key for key in dict.fromkeys(meant) if key in known]:
        return [key for key in synonyms if key.rpartition(".")[0] == section] or synonyms
    section_keys = [key for key in known if section and key.rpartition(".")[0] == section]
    similarity = {
        key: _similarity(name, key, whole=not section_keys) for key in section_keys or known
    }
    threshold = max(MIN_SIMILARITY, max(similarity.values(), default=0.0) - MAX_GAP)
    similar = [key for key in similarity if similarity[key] >= threshold]
    return sorted(similar, key=lambda key: similarity[key], reverse=True)[:3]


def _similarity(name: str, key: str, whole: bool) -> float:
    """The similarity of the last words; with ``whole`` also of the whole names."""
    ratio = SequenceMatcher(None, _last_word(name), _last_word(key)).ratio()
    return max(ratio, SequenceMatcher(None, name.lower(), key).ratio()) if whole else ratio


def _last_word(name: str) -> str:
    """``--run.log-every`` → ``log_every``."""
    return name.lower().lstrip("-").rpartition(".")[2].replace("-", "_")
