"""What settings are called in transformers, TRL, PEFT, Lightning, litgpt, nanochat and TinySeek, and what they mean here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from ttrain.config.yaml_text import one_line
from ttrain.core.files import JsonObject
from ttrain.errors import UsageError

STAGE = "*."  # before a setting that every training stage has
ANY = "*"  # any value, where it has to be written in another unit
SIMILAR = 0.85  # "learing_rate"; "layer" is no "n_layer" yet


@dataclass(frozen=True)
class Meaning:
    """The settings that a name may mean; none where only the `note` helps."""

    keys: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)  # what a value is called here
    note: str = ""

    def value(self, text: str) -> str:
        """What a value is called here."""
        return self.values.get(ANY) or self.values.get(text.lower(), text)


def meaning_of(key: str) -> Meaning | None:
    """What the last part of a key means."""
    return NAMES.get(_last_part(key))


def similar_meaning(key: str) -> Meaning | None:
    """What the last part of a key means with a letter more or less."""
    near = difflib.get_close_matches(_last_part(key), NAMES, n=1, cutoff=SIMILAR)
    return NAMES[near[0]] if near else None


def _last_part(key: str) -> str:
    return key.rpartition(".")[2].lower().replace("-", "_")


def _named(words: str, *keys: str, note: str = "", **values: str) -> dict[str, Meaning]:
    return dict.fromkeys(words.split(), Meaning(keys, values, note))


_PRECISIONS = {
    **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("float16", "16", "16-mixed", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("float32", "32", "32-true", "no", "torch.float32"), "fp32"),
}
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
}
_SCHEDULES = {
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    **dict.fromkeys(("cosine_with_min_lr", "cosine_annealing"), "cosine"),
}

_TOKENS = {ANY: "TOKENS"}  # here in tokens

NAMES: Mapping[str, Meaning] = {
    # learning rate and optimizer
    **_named("lr learning_rate max_lr peak_lr base_lr", "*.optim.lr"),
    **_named("matrix_lr", "pretrain.optim.muon_lr"),
    **_named("unembedding_lr", "pretrain.optim.head_lr"),
    **_named("optim optimizer optimizer_name", "*.optim.kind", **_OPTIMIZERS),
    **_named("wd", "*.optim.weight_decay"),
    **_named("adam_beta1 adam_beta2", "*.optim.betas", note="both means", **{ANY: "[0.9, 0.95]"}),
    **_named("beta1 beta2", "*.optim.betas", note="both means", **{ANY: "[0.9, 0.95]"}),
    **_named("adam_epsilon adam_eps epsilon", "*.optim.eps"),
    **_named("max_grad_norm grad_clip gradient_clip_val", "*.optim.clip"),
    **_named("clip_grad_norm gradient_clipping", "*.optim.clip"),
    **_named("schedule scheduler lr_schedule", "*.schedule.kind", **_SCHEDULES),
    **_named("lr_scheduler lr_scheduler_type lr_decay_style", "*.schedule.kind", **_SCHEDULES),
    **_named("warmup warmup_iters num_warmup_steps lr_warmup_steps", "*.schedule.warmup_steps"),
    **_named("warmup_ratio", "*.schedule.warmup_steps", note="in steps, not as a share", **{ANY: "100"}),
    **_named("min_lr_ratio final_lr_frac", "*.schedule.floor"),
    **_named("min_lr", "*.schedule.floor", note="as a share of the peak rate", **{ANY: "0.1"}),
    # budget and batch
    **_named("epoch num_epochs num_train_epochs max_epochs n_epochs", "*.epochs"),
    **_named("steps max_steps num_steps train_steps", "*.tokens", note="steps x tokens_per_step", **_TOKENS),
    **_named("max_iters num_iterations iterations", "*.tokens", note="steps x tokens_per_step", **_TOKENS),
    **_named("max_tokens train_tokens num_tokens token_budget", "*.tokens"),
    **_named("batch_size train_batch_size", "*.tokens_per_step", note="rows x row_length", **_TOKENS),
    **_named("global_batch_size effective_batch_size", "*.tokens_per_step", note="rows x row_length", **_TOKENS),
    **_named("total_batch_size", "*.tokens_per_step"),
    **_named(
        "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches grad_accum",
        "*.tokens_per_step",
        note="a step has so many tokens; the accumulation follows from runtime.rows_per_device",
        **_TOKENS,
    ),
    **_named(
        "per_device_train_batch_size per_device_batch_size device_batch_size micro_batch_size mbs", "runtime.rows_per_device"
    ),
    **_named("per_device_eval_batch_size eval_batch_size", "runtime.rows_per_device"),
    **_named("block_size context_length context_size seq_len", "*.row_length"),
    **_named("seq_length sequence_length sequence_len", "*.row_length"),
    **_named("max_seq_len max_seq_length cutoff_len model_max_length", "*.row_length"),
    **_named("max_length", "*.row_length", "model.max_length"),
    **_named("seed random_seed random_state", "*.seed"),
    # model
    **_named("size model_size", "model.preset", tiny="1m", small="10m", medium="124m", large="350m"),
    **_named("model", "model.preset", "model.kind"),
    **_named("model_type arch architecture", "model.kind"),
    **_named("n_layer n_layers num_layers num_hidden_layers depth", "model.layers"),
    **_named("n_embd n_embed d_model dim embed_dim width", "model.hidden_size"),
    **_named("n_head n_heads num_heads num_attention_heads", "model.heads"),
    **_named("n_kv_head n_kv_heads num_kv_heads", "model.kv_heads"),
    **_named("num_key_value_heads n_query_groups", "model.kv_heads"),
    **_named("n_inner d_ff ffn_dim mlp_dim ffn_hidden_size", "model.intermediate_size"),
    **_named("max_position_embeddings n_positions n_ctx", "model.max_length"),
    **_named("tie_word_embeddings tied_embeddings", "model.tie_embeddings"),
    **_named("num_experts num_local_experts n_routed_experts", "model.moe.experts"),
    **_named("num_experts_per_tok experts_per_token", "model.moe.top_k"),
    **_named("model_name model_name_or_path base_model", "pretrain.start_from", "sft.start_from"),
    **_named("pretrained_model init_from", "pretrain.start_from", "sft.start_from"),
    # adapter and preferences
    **_named("r lora_r lora_rank", "lora.rank"),
    **_named("lora_alpha", "lora.alpha"),
    **_named("lora_dropout", "lora.dropout"),
    **_named("target_modules lora_target_modules lora_targets", "lora.targets"),
    **_named("use_dora", "lora.kind", true="dora", false="lora"),
    **_named("load_in_4bit", "lora.quantize", true="nf4", false="none"),
    **_named("load_in_8bit", "lora.quantize", true="int8", false="none"),
    **_named("loss_type", "dpo.loss", sigmoid="dpo", kto_pair="kto"),
    # data and tokenizer
    **_named("data dataset datasets dataset_name", "data.pretrain", "data.sft", "data.lora"),
    **_named("dataset_path train_file train_files", "data.pretrain", "data.sft", "data.lora"),
    **_named("data_path data_dir data_files", "data.pretrain", "data.sft", "data.lora"),
    **_named("train_data train_dataset input", "data.pretrain", "data.sft", "data.lora"),
    **_named("document documents docs corpus text texts train", "data.pretrain"),
    **_named("chat chats messages conversations instructions", "data.sft", "data.lora"),
    **_named("pair pairs preferences preference", "data.dpo"),
    **_named("domain", "data.lora"),
    **_named("eval_dataset eval_file", "data.pretrain_heldout", "data.sft_heldout"),
    **_named("validation_file", "data.pretrain_heldout", "data.sft_heldout"),
    **_named("val_file val_data", "data.pretrain_heldout", "data.sft_heldout"),
    **_named("val_fraction val_split val_size", "reading.heldout_fraction"),
    **_named("validation_split test_size eval_ratio", "reading.heldout_fraction"),
    **_named("text_column text_key dataset_text_field", "reading.text_field"),
    **_named("max_samples max_train_samples num_samples", "reading.limit"),
    **_named("tokenizer tokenizer_name tokenizer_path", "tokenizer.existing"),
    **_named("vocab n_vocab vocabulary_size", "tokenizer.vocab_size"),
    # machine
    **_named("bf16", "*.precision", true="bf16", false="fp32"),
    **_named("fp16", "*.precision", true="fp16", false="fp32"),
    **_named("dtype torch_dtype mixed_precision", "*.precision", **_PRECISIONS),
    **_named("accelerator device_type", "runtime.device", gpu="cuda"),
    **_named("use_cpu no_cuda", "runtime.device", true="cpu", false="auto"),
    **_named("num_gpus n_gpus n_gpu nproc_per_node num_processes world_size", "runtime.devices"),
    **_named("num_nodes nnodes", "runtime.nodes"),
    **_named("strategy distributed_strategy", "runtime.parallel"),
    **_named("num_workers num_proc", "runtime.workers"),
    **_named("dataloader_num_workers preprocessing_num_workers", "runtime.workers"),
    **_named("torch_compile", "runtime.compile"),
    **_named("attn_implementation", "runtime.attention", flash_attention_2="auto", eager="auto"),
    # what is written, and how often
    **_named("logging_steps log_interval log_every_n_steps log_every", "runtime.log_every_steps"),
    **_named("eval_steps eval_interval eval_every val_check_interval", "*.validate_every_steps"),
    **_named("save_steps save_interval", "runtime.checkpoint_every_steps"),
    **_named("save_every checkpoint_interval", "runtime.checkpoint_every_steps"),
    **_named("save_total_limit save_top_k", "runtime.keep_checkpoints"),
    **_named("early_stopping early_stopping_patience", "*.early_stopping.patience"),
    **_named("report_to logger", "runtime.loggers", none="[]"),
    **_named("run_name", "name"),
    **_named("project project_name wandb_project experiment_name", "tracking.experiment"),
    **_named("output_dir out_dir", note="all is written to the home: set TTRAIN_HOME=DIR"),
    **_named("save_dir default_root_dir", note="all is written to the home: set TTRAIN_HOME=DIR"),
    **_named("resume", note="no setting is needed: the same command continues a stopped run"),
    **_named("resume_from_checkpoint", note="no setting is needed: the same command continues a stopped run"),
}  # fmt: skip

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
    for name in tree:
        if name not in TINYSEEK:
            near = difflib.get_close_matches(name, TINYSEEK, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(TINYSEEK)}"
            raise UsageError(
                f"'{one_line(name)}' (from {origin}) is not a name of TinySeek's model_config.json, to which the other "
                f"names belong; {hint} Settings of ttrain go into a file of their own: -c {origin} -c OTHER.yaml"
            )
    settings = {setting: tree[name] for name, setting in TINYSEEK.items() if setting and name in tree}
    return {"model.kind": "tinyseek", **settings}
