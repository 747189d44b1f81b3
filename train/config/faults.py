"""Error messages for configurations, and other projects' names for its keys."""

import difflib
import itertools
import re
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from polyad.model.config import SectionError
from polyad.model.config_yaml import MAX_DIGITS, NUMBER
from polyad.train.config.gone import GONE
from polyad.train.config.text import config_classes, keys
from polyad.train.errors import MAX_SHOWN, one_line, shortened, shown

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
    "model.feed_forward.router_noise": "noise_std gate_noise",
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
    """Normalizes spellings of a name, such as micro-batch-size and microBatchSize."""
    return name.lower().replace("_", "").replace("-", "")


def _ours() -> dict[str, str]:
    found = {plain(theirs): ours for ours, names in _NAMES.items() for theirs in names.split()}
    own = [ours.rpartition(".")[2] for ours in _NAMES]
    for ours, name in zip(_NAMES, own, strict=True):
        if own.count(name) == 1:
            found.setdefault(plain(name), ours)
    return found


OURS: Mapping[str, str] = _ours()
"""Our dotted keys by normalized names of other projects, or by their own last part."""


MOST = 450
"""Maximum length of an error about a configuration, without the file name."""
KEYS_SHOWN = 5
"""Number of keys of a section to suggest; classes have the most important ones first."""
NEAR, NEAR_ELSEWHERE = 0.75, 0.8
"""Minimum similarity of two names in one section, or in several, to suggest one for the other (as
in `difflib`); `lr` and `tf32` do not reach it."""


def describe(error: ValidationError, tree: type[BaseModel]) -> str:
    """Describes all errors in one line, the first few in full.

    Args:
        error: the error from pydantic.
        tree: the configuration class with the known keys.
    """
    known = set(keys(tree))
    lines: dict[str, int] = {}
    for fault in error.errors(include_url=False):
        line = shortened(_foreign(fault, error, tree, known) or _fault(fault, known), MOST)
        lines[line] = lines.get(line, 0) + 1
    told: list[str] = []
    for line in lines:
        if told and sum(map(len, told)) + len(line) > MOST:
            break
        told.append(line)
    rest = len(lines) - len(told)
    return "; ".join(told) + (f"; and {rest} more" if rest else "")


def _foreign(
    fault: Any, error: ValidationError, tree: type[BaseModel], known: set[str]
) -> str | None:
    """The line about all keys of a section that belong to another kind; None for other errors."""
    parts = [str(part) for part in fault["loc"]]
    if fault["type"] != "extra_forbidden" or len(parts) < 2:
        return None
    section, chosen = ".".join(_without_kind(parts[:-1], known)), parts[-2]
    member = _member(tree, section, chosen)
    if f"{section}.{parts[-1]}" not in known or member is None:
        return None
    names = [
        str(each["loc"][-1])
        for each in error.errors(include_url=False)
        if each["type"] == "extra_forbidden"
        and each["loc"][:-1] == fault["loc"][:-1]
        and f"{section}.{each['loc'][-1]}" in known
    ]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    are = "is a key" if len(names) == 1 else "are keys"
    return (
        f"{section}: {', '.join(names[:3])}{more} {are} of another kind than {chosen}; on the "
        f"command line the whole section, with {chosen}'s defaults, is "
        f"{section}='{_pasted(member, chosen)}'"
    )


def _pasted(member: type[BaseModel], chosen: str) -> str:
    """The first keys of a section of some kind, in command-line syntax."""
    shown = {}
    for name, field in member.model_fields.items():
        default = "PATH" if field.is_required() else field.get_default(call_default_factory=True)
        if name != "kind" and isinstance(default, str | int | float | tuple | None):
            shown[name] = list(default) if isinstance(default, tuple) else default
    values = {"kind": chosen} | dict(itertools.islice(shown.items(), KEYS_SHOWN))
    flow: str = yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=10_000)
    return flow.strip()


def _member(tree: type[BaseModel], section: str, chosen: str) -> type[BaseModel] | None:
    """The class of a section with a kind; None if there is none."""
    members = [tree]
    for name in section.split("."):
        found = [m.model_fields[name].annotation for m in members if name in m.model_fields]
        members = [each for annotation in found for each in config_classes(annotation)]
    kinds = ((m.model_fields["kind"].default, m) for m in members if "kind" in m.model_fields)
    return next((member for kind, member in kinds if kind == chosen), None)


def _fault(fault: Any, known: set[str]) -> str:
    # Unions add the member's kind to the location: model.feed_forward.dense.hidden_size.
    parts = [str(part) for part in fault["loc"]]
    kind: str = fault["type"]
    # Messages of validators may contain values.
    message = one_line(fault["msg"].removeprefix("Value error, "))
    if not parts:
        return message  # validators of the whole tree name keys themselves
    broken = fault.get("ctx", {}).get("error")
    if isinstance(broken, SectionError):  # a validator of several keys in a section
        return one_line(broken.within(".".join(_without_kind(parts, known))))
    *sections, last = parts
    key = ".".join([*_without_kind(sections, known), last])
    if kind == "extra_forbidden":
        return _unknown(key, known)
    key = shortened(key)
    if kind == "union_tag_invalid":
        chooser = fault["ctx"]["discriminator"].strip("'")
        tag = fault["ctx"]["tag"]
        *others, other = fault["ctx"]["expected_tags"].replace("'", "").split(", ")
        allowed = " or ".join([", ".join(others), other] if others else [other])
        return f"{key}.{chooser}: {shown(tag)} is not allowed: {allowed}"
    if kind == "missing":
        return f"{key}: is missing"
    if kind in {"model_type", "model_attributes_type"}:
        return f"{key}: {shown(fault['input'])} is not allowed: a section of keys is needed"
    if kind == "value_error" and re.match(r"[\w.]+: ", message):
        return message  # the validator names its keys itself
    allowed = f"{message[0].lower()}{message[1:]}{_hint(kind, fault['input'])}"
    return f"{key}: {shown(fault['input'])} is not allowed: {allowed}"


def _without_kind(sections: list[str], known: set[str]) -> list[str]:
    """The sections of a location, without the kinds that unions add."""
    leaves = known - {
        section
        for key in known
        for section in itertools.accumulate(
            key.split(".")[:-1], lambda outer, inner: f"{outer}.{inner}"
        )
    }
    if any(_without_index(sections[:n]) in leaves for n in range(1, len(sections))):
        return sections  # names from the file, such as a study's variants
    places = range(len(sections))
    for count in (0, 1, 2):  # kinds of the model and of its feed-forward
        for left_out in itertools.combinations(places, count):
            shorter = [section for place, section in enumerate(sections) if place not in left_out]
            if not shorter or _without_index(shorter) in known:
                return shorter
    return sections


def _hint(kind: str, value: Any) -> str:
    """A hint about YAML that is parsed differently than it looks; often empty."""
    if not isinstance(value, str):
        return ""
    if kind == "bool_type" and value.lower() in {"yes", "no", "on", "off", "y", "n"}:
        return ", true or false"
    if kind in {"int_type", "float_type"} and NUMBER.fullmatch(value.replace("_", "")):
        if len(value) > MAX_DIGITS:
            return f" of at most {MAX_DIGITS} characters"
        return " without _" if "_" in value else " without quotes"
    return ""


def _unknown(key: str, known: set[str]) -> str:
    """The line about an unknown key."""
    name = _without_index(key.split("."))
    of_study = "variants" in known
    if gone := GONE.get(f"study.{name}" if of_study else name) or GONE.get(name.rpartition(".")[2]):
        return f"{key}: went with {gone}; see CHANGELOG"
    if near := nearest_key(key, known):
        return f"unknown key {shortened(key)}; the nearest is {near}"
    section = _without_index(key.split(".")[:-1])
    siblings = [
        name.rpartition(".")[2] for name in sorted(known) if name.rpartition(".")[0] == section
    ]
    if len(listed := ", ".join(siblings)) <= MAX_SHOWN:
        return f"unknown key {shortened(key)}; there are {listed}"
    return (
        f"unknown key {shortened(key)}; `polyad schema` has the {len(siblings)} keys of "
        f"{section or 'the configuration'}"
    )


def nearest_key(key: str, known: set[str]) -> str | None:
    """The key that may be meant: in this section, in another one, or by another project's name."""
    *sections, last = key.split(".")
    section, name = _without_index(sections), plain(last)[:100]
    siblings = {plain(k.rpartition(".")[2]): k for k in known if k.rpartition(".")[0] == section}
    if name in siblings:
        return siblings[name]
    if OURS.get(name) in known:
        return OURS[name]
    everywhere = _unambiguous(known)
    if name in everywhere:
        return everywhere[name]
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=NEAR):
        return siblings[close[0]]
    ours = {theirs: key for theirs, key in OURS.items() if key in known} | everywhere
    close = difflib.get_close_matches(name, ours, n=1, cutoff=NEAR_ELSEWHERE)
    return ours[close[0]] if close else None


def _unambiguous(known: set[str]) -> dict[str, str]:
    """Dotted keys by their last part, if one key with that part is above all others."""
    found: dict[str, list[str]] = {}
    for key in sorted(known, key=lambda key: key.count(".")):
        found.setdefault(plain(key.rpartition(".")[2]), []).append(key)
    return {
        name: keys[0]
        for name, keys in found.items()
        if len(keys) == 1 or keys[0].count(".") < keys[1].count(".")
    }


def _without_index(sections: list[str]) -> str:
    """The dotted key without a list index: data.mixture.0 is data.mixture."""
    return ".".join(section for section in sections if not section.isdigit())
