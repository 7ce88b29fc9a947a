"""What settings are called in transformers, TRL, PEFT, Lightning, litgpt, nanochat and TinySeek, and what they mean here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from ttrain.config.training import TRAININGS
from ttrain.config.yaml_text import one_line
from ttrain.core.files import JsonObject
from ttrain.errors import UsageError

STAGE = "*."  # before a setting that every training stage has
SIMILAR = 0.85  # "learing_rate"; "layer" is no "n_layer" yet
MOST_NAMES = 8  # more settings of a name are not told

# By our settings, what others call them.
NAMES: Mapping[str, str] = {
    # learning rate and optimizer
    "*.optim.lr": "lr learning_rate max_lr peak_lr base_lr",
    "pretrain.optim.muon_lr": "matrix_lr",
    "pretrain.optim.head_lr": "unembedding_lr",
    "*.optim.kind": "optim optimizer optimizer_name",
    "*.optim.weight_decay": "wd",
    "*.optim.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "*.optim.eps": "adam_epsilon adam_eps epsilon",
    "*.optim.clip": "max_grad_norm grad_clip gradient_clip_val clip_grad_norm gradient_clipping",
    "*.schedule.kind": "schedule scheduler lr_schedule lr_scheduler lr_scheduler_type lr_decay_style",
    "*.schedule.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps warmup_ratio",
    "*.schedule.floor": "min_lr_ratio final_lr_frac min_lr",
    # budget and batch
    "*.epochs": "epoch num_epochs num_train_epochs max_epochs n_epochs",
    "*.tokens": "steps max_steps num_steps train_steps max_iters num_iterations iterations max_tokens "
    "train_tokens num_tokens token_budget",
    "*.tokens_per_step": "batch_size train_batch_size global_batch_size effective_batch_size total_batch_size "
    "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches grad_accum",
    "runtime.rows_per_device": "per_device_train_batch_size per_device_batch_size device_batch_size "
    "micro_batch_size mbs per_device_eval_batch_size eval_batch_size",
    "*.row_length": "block_size context_length context_size seq_len seq_length sequence_length sequence_len "
    "max_seq_len max_seq_length cutoff_len model_max_length",
    "*.row_length model.max_length": "max_length",
    "*.seed": "seed random_seed random_state",
    # model
    "model.preset": "size model_size",
    "model.preset model.kind": "model",
    "model.kind": "model_type arch architecture",
    "model.layers": "n_layer n_layers num_layers num_hidden_layers depth",
    "model.hidden_size": "n_embd n_embed d_model dim embed_dim width",
    "model.heads": "n_head n_heads num_heads num_attention_heads",
    "model.kv_heads": "n_kv_head n_kv_heads num_kv_heads num_key_value_heads n_query_groups",
    "model.intermediate_size": "n_inner d_ff ffn_dim mlp_dim ffn_hidden_size",
    "model.max_length": "max_position_embeddings n_positions n_ctx",
    "model.tie_embeddings": "tie_word_embeddings tied_embeddings",
    "model.moe.experts": "num_experts num_local_experts n_routed_experts",
    "model.moe.top_k": "num_experts_per_tok experts_per_token",
    "pretrain.start_from sft.start_from": "model_name model_name_or_path base_model pretrained_model init_from",
    # adapter and preferences
    "lora.rank": "r lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "target_modules lora_target_modules lora_targets",
    "lora.kind": "use_dora",
    "lora.quantize": "load_in_4bit load_in_8bit",
    "dpo.loss": "loss_type",
    # data and tokenizer
    "data.pretrain data.sft data.lora": "data dataset datasets dataset_name dataset_path train_file train_files "
    "data_path data_dir data_files train_data train_dataset input",
    "data.pretrain": "document documents docs corpus text texts train",
    "data.sft data.lora": "chat chats messages conversations instructions",
    "data.dpo": "pair pairs preferences preference",
    "data.lora": "domain",
    "data.pretrain_heldout data.sft_heldout": "eval_dataset eval_file validation_file val_file val_data",
    "reading.heldout_fraction": "val_fraction val_split val_size validation_split test_size eval_ratio",
    "reading.text_field": "text_column text_key dataset_text_field",
    "reading.limit": "max_samples max_train_samples num_samples",
    "tokenizer.existing": "tokenizer tokenizer_name tokenizer_path",
    "tokenizer.vocab_size": "vocab n_vocab vocabulary_size",
    # machine
    "*.precision": "bf16 fp16 dtype torch_dtype mixed_precision",
    "runtime.device": "accelerator device_type use_cpu no_cuda",
    "runtime.devices": "num_gpus n_gpus n_gpu nproc_per_node num_processes world_size",
    "runtime.nodes": "num_nodes nnodes",
    "runtime.parallel": "strategy distributed_strategy",
    "runtime.workers": "num_workers num_proc dataloader_num_workers preprocessing_num_workers",
    "runtime.compile": "torch_compile",
    "runtime.attention": "attn_implementation",
    # what is written, and how often
    "runtime.log_every_steps": "logging_steps log_interval log_every_n_steps log_every",
    "*.validate_every_steps": "eval_steps eval_interval eval_every val_check_interval",
    "runtime.checkpoint_every_steps": "save_steps save_interval save_every checkpoint_interval",
    "runtime.keep_checkpoints": "save_total_limit save_top_k",
    "*.early_stopping.patience": "early_stopping early_stopping_patience",
    "runtime.loggers": "report_to logger",
    "name": "run_name",
    "tracking.experiment": "project project_name wandb_project experiment_name",
}

# What else is to be known of such a name.
NOTES: Mapping[str, str] = {
    "in steps, not as a share": "warmup_ratio",
    "as a share of the peak rate": "min_lr",
    "in tokens: steps x tokens_per_step": "steps max_steps num_steps train_steps max_iters num_iterations iterations",
    "in tokens: rows x row_length": "batch_size train_batch_size global_batch_size effective_batch_size "
    "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches grad_accum",
    "all is written to the home: set TTRAIN_HOME=DIR": "output_dir out_dir save_dir default_root_dir",
    "no setting is needed: the same command continues a stopped run": "resume resume_from_checkpoint",
}
SETTINGS = {name: settings.split() for settings, names in NAMES.items() for name in names.split()}
NOTE_OF = {name: note for note, names in NOTES.items() for name in names.split()}


def suggestion(key: str, valid_keys: Sequence[str]) -> str:
    """What a wrong name may mean: "did you mean 'sft.tokens'? (in tokens: steps x tokens_per_step)"; "" for nothing."""
    near = similar_settings(key, valid_keys)
    names = " or ".join(f"'{name}'" for name in near)
    meant, note = names and f"did you mean {names}?", NOTE_OF.get(_last_part(key), "")
    return f"{meant} ({note})" if meant and note else meant or note


def similar_settings(key: str, valid_keys: Sequence[str]) -> list[str]:
    """The settings that other libraries call so, with a letter more or less, else those that end so, else the most similar.

    Of these the ones in the section of the key, if there are any.
    """
    last = _last_part(key)
    section = f"{key.lower().partition('.')[0]}."
    near = difflib.get_close_matches(last, [*SETTINGS, *NOTE_OF], n=1, cutoff=SIMILAR)
    meant = [name for setting in SETTINGS.get(near[0], ()) for name in _in_stages(setting)] if near else []
    for names in (meant, [name for name in valid_keys if f".{name}".endswith(f".{last}")]):
        names = [name for name in names if name in valid_keys]
        names = [name for name in names if name.startswith(section)] or names
        if 1 <= len(names) <= MOST_NAMES:
            return names
    return [] if near else difflib.get_close_matches(key.lower(), valid_keys, n=1)


def _last_part(key: str) -> str:
    return key.rpartition(".")[2].lower().replace("-", "_")


def _in_stages(setting: str) -> list[str]:
    """The names of a setting in all training stages, and alone, as tasks have it."""
    name = setting.removeprefix(STAGE)
    return [setting] if name == setting else [name, *(f"{stage}.{name}" for stage in TRAININGS)]


# The names of TinySeek's `model_config.json`. None: not needed here.

TINYSEEK: Mapping[str, str | None] = {
    "n_layer": "model.layers",
    "n_head": "model.heads",
    "d_model": "model.hidden_size",
    "d_c": "model.fields.latent_size",
    "d_r": "model.fields.rope_head_dim",
    "hidden": "model.moe.expert_size",
    "other_experts": "model.moe.experts",
    "shared_experts": "model.moe.shared_experts",
    "keep": "model.moe.top_k",
    "alpha": "model.moe.balance",
    "dropout": "model.dropout",
    "ro_theta": "model.rope_theta",
    "scale": "model.init_std",
    "vocab_size": "tokenizer.vocab_size",
    "device": None,
    "pad_idx": None,
}


def from_tinyseek(tree: JsonObject, origin: str) -> JsonObject:
    """The settings that TinySeek's `model_config.json` stands for; the tree itself where it has none of its names."""
    if tree.keys().isdisjoint(TINYSEEK):
        return tree
    for name in tree.keys() - TINYSEEK.keys():
        near = difflib.get_close_matches(name, TINYSEEK, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(TINYSEEK)}"
        raise UsageError(
            f"'{one_line(name)}' (from {origin}) is not a name of TinySeek's model_config.json, to which the other "
            f"names belong; {hint} Settings of ttrain go into a file of their own: -c {origin} -c OTHER.yaml"
        )
    settings = {setting: tree[name] for name, setting in TINYSEEK.items() if setting and name in tree}
    return {"model.kind": "tinyseek", **settings}
