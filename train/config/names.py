"""Names that other projects give to Polyad's keys, so that an error can suggest Polyad's."""

from collections.abc import Mapping

_NAMES = {
    "seed": "random_seed rng_seed manual_seed",
    "run.folder": "out output output_dir out_dir save_dir log_dir logdir run_dir run_name "
    "checkpoint_dir ckpt_dir experiment exp_name tensorboard_dir",
    "model.kind": "model_type model_name architecture arch",
    "model.num_layers": "n_layer n_layers num_hidden_layers num_blocks n_blocks layers depth",
    "model.num_heads": "n_head n_heads num_attention_heads attention_heads heads",
    "model.hidden_size": "n_embd n_embed d_model dim embed_dim emb_dim model_dim embedding_size "
    "hidden_dim width",
    "model.sequence_length": "block_size seq_len seq_length context_length context_size ctx_len "
    "n_ctx n_positions max_seq_len max_seq_length max_sequence_length max_position_embeddings "
    "max_length",
    "model.vocab_size": "vocab n_vocab vocabulary vocabulary_size padded_vocab_size",
    "model.dropout": "resid_pdrop embd_pdrop attn_pdrop hidden_dropout attention_dropout drop_rate "
    "p_drop",
    "model.layer_norm_epsilon": "layer_norm_eps norm_eps rms_norm_eps layernorm_epsilon",
    "model.initializer_range": "init_std initializer_std",
    "model.tied_embeddings": "tie_embeddings tie_word_embeddings weight_tying tied",
    "model.recompute": "gradient_checkpointing activation_checkpointing recompute_activations",
    "model.compile": "torch_compile",
    "model.feed_forward": "ffn mlp moe",
    "model.feed_forward.hidden_size": "d_ff n_inner intermediate_size ffn_hidden_size ffn_dim "
    "mlp_dim",
    "model.feed_forward.num_experts": "experts n_experts num_local_experts n_routed_experts "
    "moe_num_experts",
    "model.feed_forward.top_k": "k topk moe_top_k moe_router_topk num_experts_per_tok "
    "num_experts_per_token",
    "model.feed_forward.router_noise": "noise_std gate_noise router_jitter_noise",
    "model.feed_forward.capacity_order": "batch_priority batch_prioritized_routing",
    "model.feed_forward.evaluation_capacity_factor": "eval_capacity_factor",
    "model.feed_forward.expert_hidden_size": "moe_intermediate_size expert_size expert_dim",
    "data.path": "dataset dataset_path data_path data_dir train_data train_file dataset_name",
    "data.num_workers": "workers dataloader_num_workers",
    "train.steps": "max_steps max_iters num_steps n_steps total_steps num_iters train_iters "
    "training_steps train_steps iterations iters epochs num_epochs max_epochs num_train_epochs",
    "train.global_batch_size": "batch batch_size bs train_batch_size total_batch_size "
    "gradient_accumulation gradient_accumulation_steps grad_accum grad_accum_steps "
    "accumulate_grad_batches accumulation_steps",
    "train.micro_batch_size": "micro_batch device_batch_size per_device_batch_size "
    "per_device_train_batch_size train_micro_batch_size_per_gpu",
    "train.precision": "bf16 fp16 fp32 float16 bfloat16 dtype torch_dtype amp mixed_precision",
    "train.tf32": "allow_tf32",
    "train.ema": "ema_decay use_ema model_ema model_ema_decay polyak_decay moving_average",
    "optimizer.kind": "optim optimizer_type",
    "optimizer.learning_rate": "lr max_lr peak_lr base_lr",
    "optimizer.weight_decay": "wd",
    "optimizer.decay": "decay_mask weight_decay_mask no_decay",
    "optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2 adam_betas",
    "optimizer.epsilon": "eps adam_eps adam_epsilon",
    "optimizer.clip_grad_norm": "clip clip_grad grad_clip grad_norm_clip max_norm max_grad_norm "
    "gradient_clipping gradient_clip_val",
    "schedule.kind": "lr_schedule lr_scheduler lr_scheduler_type lr_decay_style",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters",
    "schedule.decay_steps": "decay_iters lr_decay_steps lr_decay_iters",
    "schedule.final_ratio": "min_lr min_lr_ratio final_lr",
    "loss.load_balance": "aux_loss aux_loss_coef router_aux_loss_coef moe_aux_loss_coeff "
    "load_balance_coef load_balancing_loss balance_loss",
    "loss.router_z": "z_loss router_z_loss router_z_loss_coef moe_z_loss_coeff",
    "loss.importance": "importance_loss importance_loss_weight importance_loss_coef",
    "loss.load": "load_loss load_loss_weight load_loss_coef",
    "parallel.tensor_parallel_size": "tp tp_size tensor_parallel tensor_model_parallel_size "
    "model_parallel_size",
    "parallel.expert_parallel_size": "ep ep_size expert_parallel expert_model_parallel_size",
    "parallel.zero_stage": "zero stage zero_optimization",
    "parallel.bucket_size": "reduce_bucket_size allgather_bucket_size",
    "parallel.timeout_minutes": "timeout ddp_timeout distributed_timeout_minutes",
    "checkpoint.every": "save_steps save_every save_interval save_freq checkpoint_every "
    "checkpoint_interval ckpt_interval",
    "checkpoint.asynchronous": "async async_save",
    "checkpoint.keep_best": "save_best load_best_model_at_end save_best_only",
    "evaluation.patience": "early_stopping early_stopping_patience",
    "checkpoint.keep_last": "save_total_limit save_top_k max_checkpoints keep_checkpoints",
    "checkpoint.init_from": "pretrained load load_from from_pretrained pretrained_model "
    "model_name_or_path resume_from resume_from_checkpoint",
    "evaluation.every": "eval_every eval_steps eval_interval eval_freq val_every val_interval "
    "val_check_interval",
    "evaluation.max_windows": "eval_iters val_iters limit_val_batches",
    "evaluation.batch_size": "eval_batch_size val_batch_size per_device_eval_batch_size",
    "log.every": "log_every log_interval log_steps logging_steps log_freq print_every",
    "log.trackers": "tensorboard wandb wandb_log wandb_project use_wandb report_to logger tb",
}  # fmt: skip


def plain(name: str) -> str:
    """A name in one form for all spellings, as micro-batch-size and microBatchSize."""
    return name.lower().replace("_", "").replace("-", "")


def _ours() -> dict[str, str]:
    found = {plain(theirs): ours for ours, names in _NAMES.items() for theirs in names.split()}
    own = [ours.rpartition(".")[2] for ours in _NAMES]
    for ours, name in zip(_NAMES, own, strict=True):
        if own.count(name) == 1:
            found.setdefault(plain(name), ours)
    return found


OURS: Mapping[str, str] = _ours()
"""Our dotted key by the plain form of another project's name for it, or of its own last name."""
