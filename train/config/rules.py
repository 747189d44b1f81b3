"""Validation rules between sections of a configuration, or between a run and its next start."""

import json
from pathlib import Path

from polyad.data.images.config import ImageDataConfig
from polyad.model.decoder import DecoderSettings
from polyad.model.decoder_config import DecoderConfig
from polyad.model.emoe.config import EmergentMoEConfig
from polyad.model.mixture import MixtureConfig
from polyad.model.settings import ModelSettings
from polyad.model.smoe.config import SelectingConfig, SparseMoEConfig
from polyad.model.vision import ImageSettings
from polyad.parallel.dims import Dims
from polyad.train.config.run import RunConfig
from polyad.train.config.text import below, flatten
from polyad.train.errors import ConfigError, shown
from polyad.train.tasks.losses import DistillConfig

# Keys or sections that may change when a run is resumed. Changing any other makes it another run.
MAY_CHANGE_ON_RESUME = (
    # The data is compared by its fingerprint, not by path or mixture.
    "run", "data.path", "data.mixture", "data.num_workers", "data.tokenizer",
    "data.padding", "data.max_damaged", "train.steps",
    "train.micro_batch_size", "train.max_skipped_steps", "train.ema", "train.cuda_graph",
    "optimizer.learning_rate", "schedule", "parallel", "checkpoint", "evaluation", "monitor", "log",
    "model.recompute", "model.compile",
    # Initial weights matter only to new runs.
    "model.feed_forward.scale_residual_init",
)  # fmt: skip


def validate(config: RunConfig, world_size: int) -> Dims:
    """Checks the sections against one another.

    Args:
        config: the tree.
        world_size: number of processes.

    Returns:
        The layout.

    Raises:
        ConfigError: two keys contradict each other.
        LayoutError: degrees or batch sizes do not fit the processes.
    """
    dims = Dims(
        world_size=world_size,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        expert_parallel_size=config.parallel.expert_parallel_size,
    )
    check_tensor_parallel(config.model, dims.tensor_parallel_size)
    if config.parallel.sequence_parallel:
        if dims.tensor_parallel_size == 1:
            raise ConfigError(
                "parallel.sequence_parallel: true needs a parallel.tensor_parallel_size of 2 or "
                "more, not 1"
            )
        if not isinstance(config.model, DecoderSettings):
            raise ConfigError(
                "parallel.sequence_parallel: true is not allowed with model.kind: "
                f"{config.model.kind}; allowed: gpt2, decoder"
            )
    check_experts(config, dims.expert_parallel_size)
    check_fluctuation(config)
    check_losses(config)
    check_mixing(config)
    check_one_expert(config)
    check_muon(config)
    check_sample_similarity(config)
    check_blocks(config)
    if config.adapt.lora is not None and config.checkpoint.init_from is None:
        raise ConfigError(
            "adapt.lora: needs the weights to which adapters are added: set checkpoint.init_from "
            "to a checkpoint, a run or a folder of weights"
        )
    train, schedule = config.train, config.schedule
    dims.accumulation_steps(train.global_batch_size, train.micro_batch_size)
    if schedule.decay_steps is not None and schedule.warmup_steps > schedule.decay_steps:
        raise ConfigError(
            f"schedule.warmup_steps: {schedule.warmup_steps} is more than schedule.decay_steps: "
            f"{schedule.decay_steps}"
        )
    check_windows(config)
    if config.evaluation.patience is not None and config.evaluation.every == 0:
        raise ConfigError(
            f"evaluation.patience: {config.evaluation.patience} is not allowed with "
            "evaluation.every: 0, which validates only at the end; set it to 1 or more"
        )
    if config.model.compile and config.parallel.zero_stage == 3:
        raise ConfigError(
            "model.compile: true is not allowed with parallel.zero_stage: 3: DeepSpeed's "
            "hooks on every module send the compiler back to eager code; use stage 1 or 2"
        )
    check_cuda_graph(config, dims)
    return dims


def check_cuda_graph(config: RunConfig, dims: Dims) -> None:
    """Checks that every block can be captured as a CUDA graph: see `model/cuda_graph.py`.

    Raises:
        ConfigError: it cannot.
    """
    if not config.train.cuda_graph:
        return
    sections = config.model.feed_forwards().values()
    kinds = dict.fromkeys(each.kind for each in sections)
    mixes = any(getattr(each, "gate_norm", "layer") == "batch" for each in sections)
    needs = [
        (
            config.model.kind in ("gpt2", "vit"),
            f"model.kind: gpt2 or vit, not {config.model.kind}, whose blocks take more than tokens",
        ),
        (
            not kinds.keys() - {"dense", "mumoe"},
            f"feed-forwards of kind dense or mumoe, not {' and '.join(kinds)}: products of "
            f"experts may wait for their sizes",
        ),
        (
            config.adapt.lora is None,
            "adapt.lora: null: frozen embeddings give the first block nothing to differentiate",
        ),
        (
            config.model.recompute == "none",
            "model.recompute: none: graphs compute nothing again",
        ),
        (
            config.train.precision == "bf16",
            "train.precision: bf16: in fp32 gradients would stay where the next pass overwrites "
            "them",
        ),
        (
            config.parallel.zero_stage < 3,
            "parallel.zero_stage of 1 or 2: stage 3 moves weights",
        ),
        (
            dims.tensor_parallel_size == 1 and not (mixes and dims.data_parallel_size > 1),
            "blocks in which no processes talk: parallel.tensor_parallel_size: 1, and with "
            "gate_norm: batch one process",
        ),
    ]
    for given, wanted in needs:
        if not given:
            raise ConfigError(f"train.cuda_graph: true needs {wanted}; or set it to false")


def check_blocks(config: RunConfig) -> None:
    """Checks that replaced feed-forwards can learn from the originals.

    Raises:
        ConfigError: they cannot, or a key would have no effect.
    """
    distill, model = config.distill, config.model
    if distill.blocks is None:
        return
    key = f"distill.blocks: {distill.blocks}"
    if distill.teacher is None:
        raise ConfigError(f"{key} needs distill.teacher, the model whose feed-forwards teach")
    if config.data.kind != "text":
        raise ConfigError(f"{key} is not allowed with data.kind: {config.data.kind}; allowed: text")
    if not isinstance(model, DecoderSettings) or model.replaced is None:
        raise ConfigError(f"{key} needs model.replaced, the blocks whose feed-forwards learn")
    unused = DistillConfig()
    for name, value, allowed in (
        ("distill.weight", distill.weight, unused.weight),
        ("distill.temperature", distill.temperature, unused.temperature),
        ("checkpoint.init_from", config.checkpoint.init_from, None),
        ("adapt.lora", config.adapt.lora and "{...}", None),
        ("model.recompute", model.recompute, "none"),
        ("train.cuda_graph", config.train.cuda_graph, False),
        ("parallel.sequence_parallel", config.parallel.sequence_parallel, False),
    ):
        if value != allowed:
            said, instead = (json.dumps(each).strip('"') for each in (value, allowed))
            raise ConfigError(
                f"{name}: {said} is not allowed with {key}: all weights except the replaced "
                f"feed-forwards are the teacher's, and frozen; allowed: {instead}"
            )


def check_windows(config: RunConfig) -> None:
    """Checks that validation windows cover every token.

    Raises:
        ConfigError: they do not.
    """
    stride, length = config.evaluation.stride, config.model.units_per_sample()
    if stride is not None and config.data.kind != "text":
        raise ConfigError(
            f"evaluation.stride: {stride} applies only to text, and is not allowed with data.kind: "
            f"{config.data.kind}; allowed: null"
        )
    if stride is not None and stride > length:
        raise ConfigError(
            f"evaluation.stride: {stride} is more than model.sequence_length: {length}, so some "
            "tokens would not be scored"
        )


def check_tensor_parallel(model: ModelSettings, size: int) -> None:
    """Checks that everything that tensor parallelism shards has equal parts.

    Raises:
        ConfigError: it does not divide heads, width, inner width or the ranks of factors, or the
            model cannot be sharded.
    """
    cuts = model.cut_sizes()
    if cuts is None:
        if size > 1:
            raise ConfigError(
                f"parallel.tensor_parallel_size: {size} is not allowed with model.kind: "
                f"{model.kind}, whose layers are not cut; allowed: 1"
            )
        return
    for choices in cuts:
        if all(value % size for value in choices.values()):
            sizes = " nor ".join(f"{key}: {value}" for key, value in choices.items())
            raise ConfigError(f"parallel.tensor_parallel_size: {size} does not divide {sizes}")
    groups = model.known_key_value_heads() if isinstance(model, DecoderConfig) else size
    if groups % size and size % groups:
        raise ConfigError(
            f"parallel.tensor_parallel_size: {size} neither divides model.num_key_value_heads: "
            f"{groups} nor is a multiple of it"
        )


def check_experts(config: RunConfig, size: int) -> None:
    """Checks that experts can be distributed over processes.

    Raises:
        ConfigError: there are none, they cannot be divided evenly, or ZeRO does not support them.
    """
    sparse = {
        key: each
        for key, each in config.model.feed_forwards().items()
        if isinstance(each, SelectingConfig)
    }
    if not sparse:
        if size > 1:
            kinds = _kinds(config) or "no feed-forward"
            raise ConfigError(
                f"parallel.expert_parallel_size: {size} is not allowed with {kinds}, which has no "
                "separate experts to distribute"
            )
        return
    for key, feed_forward in sparse.items():
        if feed_forward.num_experts % size:
            raise ConfigError(
                f"parallel.expert_parallel_size: {size} does not divide "
                f"{key}.num_experts: {feed_forward.num_experts}"
            )


def _kinds(config: RunConfig) -> str:
    known = config.model.feed_forwards()
    return " and ".join(f"{key}.kind: {each.kind}" for key, each in known.items())


def check_fluctuation(config: RunConfig) -> None:
    """Checks that there are experts and checkpoints whose routing can be compared.

    Raises:
        ConfigError: there are none.
    """
    if not config.log.fluctuation:
        return
    if not config.model.has_experts():
        raise ConfigError(
            f"log.fluctuation: true is not allowed with {_kinds(config)}, which has no experts "
            f"that tokens could change"
        )
    if config.checkpoint.every == 0:
        raise ConfigError(
            "log.fluctuation: true is not allowed with checkpoint.every: 0: the only checkpoint, "
            "at the end, has no earlier one to be compared with; set it to 1 or more"
        )


def check_losses(config: RunConfig) -> None:
    """Checks that the model has the routers that losses need.

    Raises:
        ConfigError: there is none, so the loss would be silently ignored.
    """
    loss = config.loss
    routers = [
        each for each in config.model.feed_forwards().values() if isinstance(each, SelectingConfig)
    ]
    sparse = [each for each in routers if isinstance(each, SparseMoEConfig)]
    if loss.sequence_balance and not sparse:
        raise ConfigError(
            f"loss.sequence_balance: {loss.sequence_balance:g} is not allowed with "
            f"{_kinds(config)}: it needs a feed-forward of kind: smoe; otherwise only 0 is allowed"
        )
    if loss.load_balance and loss.load_balance_over == "model" and len(routers) != 1:
        raise ConfigError(
            f"loss.load_balance_over: model is not allowed with {_kinds(config)}: it needs one "
            "feed-forward of kind: smoe or emoe, whose layers have the same experts; allowed: "
            "layer"
        )
    if loss.load and not any(router.router_noise for router in routers):
        raise ConfigError(
            f"loss.load: {loss.load:g} depends on the router's noise: it needs a feed-forward of "
            "kind: smoe or emoe with router_noise above 0; otherwise only 0 is allowed"
        )


def check_mixing(config: RunConfig) -> None:
    """Checks that mixed images come in pairs.

    Raises:
        ConfigError: a micro-batch has an odd number of images.
    """
    data, size = config.data, config.train.micro_batch_size
    if isinstance(data, ImageDataConfig) and data.mixes and size % 2:
        key = "mixup" if data.augmentation.mixup else "cutmix"
        raise ConfigError(
            f"train.micro_batch_size: {size} is odd, but images are mixed in pairs "
            f"(data.augmentation.{key}: {getattr(data.augmentation, key):g}); use an even number, "
            f"or set data.augmentation.{key}: 0"
        )


def check_one_expert(config: RunConfig) -> None:
    """Checks for at least two experts if weights sum to 1, since a single weight never changes.

    Raises:
        ConfigError: a gate or router would get no gradient.
    """
    if isinstance(config.model, MixtureConfig) and config.model.top_k == 1:
        raise ConfigError(
            "model.top_k: 1 is not allowed: the share of one expert is always 1, so the gate "
            "would learn nothing; allowed: 2 or more, or null"
        )
    for key, each in config.model.feed_forwards().items():
        if not isinstance(each, EmergentMoEConfig) or each.score == "avg_k":
            continue
        if each.used_experts() == 1:
            raise ConfigError(
                f"{key}.score: {each.score} is not allowed with one expert per token, whose weight "
                "is always 1, so the router would learn nothing; use avg_k, or a top_k of 2 or "
                "more"
            )


def check_muon(config: RunConfig) -> None:
    """Checks that processes have Muon's matrices whole, and that there are some.

    Raises:
        ConfigError: ZeRO 3 or tensor parallelism shards them, or only narrow adapters are trained.
    """
    if config.optimizer.kind != "muon":
        return
    for key, allowed in (("zero_stage", (1, 2)), ("tensor_parallel_size", (1,))):
        if (value := getattr(config.parallel, key)) not in allowed:
            said = f"allowed: {', '.join(map(str, allowed))}"
            raise ConfigError(
                f"parallel.{key}: {value} is not allowed with optimizer.kind: muon, whose update "
                f"needs whole matrices, which this would shard; {said}"
            )
    if config.adapt.lora is not None:
        raise ConfigError(
            "adapt.lora: is not allowed with optimizer.kind: muon, which updates the matrices "
            "that adapters freeze; set it to null, or use optimizer.kind: adamw or sgd"
        )


def check_sample_similarity(config: RunConfig) -> None:
    """Checks that the sample-similarity loss has experts, pairs of samples and distances.

    Raises:
        ConfigError: it does not, or the layout would count its gradient several times.
    """
    pairs = config.loss.sample_similarity
    if pairs is None:
        return
    head = getattr(config.model, "head", None)
    kinds = {config.model.kind, getattr(head, "kind", head)}
    if config.model.kind != "mixture":
        kinds |= {each.kind for each in config.model.feed_forwards().values()}
    if not kinds & {"smoe", "emoe", "mumoe", "mixture"}:
        raise ConfigError(
            f"loss.sample_similarity: is not allowed with {_kinds(config)}, which has no experts "
            "that samples could share; allowed: null"
        )
    if pairs.of == "input" and not isinstance(config.model, ImageSettings):
        raise ConfigError(
            "loss.sample_similarity.of: input is not allowed with model.kind: "
            f"{config.model.kind}, whose inputs are token ids, which have no distance; allowed: "
            "layer_input"
        )
    if config.train.micro_batch_size < 2:
        raise ConfigError(
            f"train.micro_batch_size: {config.train.micro_batch_size} is not allowed with "
            "loss.sample_similarity, which compares the samples of a micro-batch; allowed: 2 or "
            "more"
        )
    size = config.parallel.tensor_parallel_size
    if size > 1 and "mumoe" in kinds:
        raise ConfigError(
            f"parallel.tensor_parallel_size: {size} is not allowed with loss.sample_similarity and "
            f"a muMoE, whose gate would get its gradient {size} times; allowed: 1"
        )


def refuse_changes(saved: RunConfig, now: RunConfig, origin: Path) -> None:
    """Checks that a configuration continues the run of another one.

    Raises:
        ConfigError: keys that define the run differ; they are named with both values.
    """
    before, after = flatten(saved.model_dump(mode="json")), flatten(now.model_dump(mode="json"))
    changed = [
        f"{key}: {shown(before.get(key))} there, {shown(after.get(key))} here"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not below(key, MAY_CHANGE_ON_RESUME)
    ]
    if changed:
        raise ConfigError(
            f"{origin}: holds another run: {'; '.join(changed[:3])}"
            + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
            + ". Choose another run.folder, or change the keys back"
        )
