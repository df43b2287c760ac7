"""The configuration: every key, its type, default, range and one line of meaning.

These frozen dataclasses are the single truth. `default_config()` shows them as an `ml_collections.ConfigDict`, which
config files change and the command line overrides; `to_config` makes them dataclasses again and rejects what is unknown,
ill-typed or out of range.
"""

import dataclasses
import re
from typing import Any

from jaxlm import presets
from partitioning.declaration import DeclarationError, leaf, read, section
from partitioning.mesh import MeshConfig
from partitioning.pipeline import PipelineConfig
from partitioning.tables import ShardingConfig

NORMS = ("rmsnorm", "layernorm")
GATED_ACTIVATIONS = ("swiglu", "geglu")
PLAIN_ACTIVATIONS = ("gelu", "gelu_exact", "relu", "relu_squared", "silu")
NORM_PLACEMENTS = ("before", "after", "both")
QK_NORMS = ("head", "all")
POSITIONS = ("rope", "learned", "none")
OPTIMIZERS = ("adamw", "adafactor", "lion", "muon", "sgd")
SCHEDULES = ("constant", "linear", "cosine", "wsd")
LARGEST_SEED = 2**32 - 1
DTYPES = ("float32", "bfloat16", "float16")
PACKS = ("split", "best_fit")
CONTENTS = ("text", "chat", "preference")
REACTIONS = ("stop", "skip", "rollback")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only Transformer, whose options span the families of docs/huggingface.md."""

    vocab_size: int = leaf(264, "rows of the embedding; at least the tokenizer's", at_least=1)
    num_layers: int = leaf(4, "Transformer blocks", at_least=1)
    embed_dim: int = leaf(256, "width of the residual stream", at_least=1)
    num_heads: int = leaf(4, "query heads", at_least=1)
    num_kv_heads: int | None = leaf(None, "key and value heads; a divisor of num_heads (None: num_heads)", at_least=1)
    head_dim: int | None = leaf(None, "width of one head (None: embed_dim / num_heads)", at_least=1)
    mlp_dim: int = leaf(704, "hidden width of the MLP", at_least=1)
    norm: str = leaf("rmsnorm", "normalisation of the blocks' parts and at the end", choices=NORMS)
    norm_epsilon: float = leaf(1e-5, "added to the variance in normalisation", above=0)
    norm_placement: str = leaf(
        "before", "where in a block: before attention and MLP, after each (before it is added), or both", choices=NORM_PLACEMENTS
    )
    norm_unit_offset: bool = leaf(False, "gains of RMSNorm are stored as their difference from 1")
    activation: str = leaf("swiglu", "gated (swiglu, geglu) or plain MLP", choices=GATED_ACTIVATIONS + PLAIN_ACTIVATIONS)
    position: str = leaf("rope", "how tokens know their place", choices=POSITIONS)
    rope_theta: float = leaf(10_000.0, "base wavelength of RoPE", above=0)
    rope_scaling: dict[str, Any] | None = leaf(
        None,
        "dict(kind='linear', factor), dict(kind='llama3', factor, low_freq_factor, high_freq_factor, original_max_positions) or "
        "dict(kind='longrope', short_factor, long_factor, attention_factor, original_max_positions)",
    )
    rope_fraction: float = leaf(1.0, "share of each head that RoPE turns, its first part", above=0, at_most=1)
    rope_local_theta: float | None = leaf(
        None, "base wavelength, unscaled, in layers that have a window (None: as in the others)", above=0
    )
    max_positions: int = leaf(2048, "longest sequence; rows of a learned position table", at_least=1)
    qk_norm: bool = leaf(False, "normalise queries and keys before RoPE")
    qk_norm_over: str = leaf("head", "what they are normalised over: each head, or all heads together", choices=QK_NORMS)
    bias: bool = leaf(False, "biases on every projection (and offsets in layernorm)")
    qkv_bias: bool | None = leaf(None, "biases on queries, keys and values (None: as bias)")
    output_bias: bool | None = leaf(None, "biases on the attention's output (None: as bias)")
    mlp_bias: bool | None = leaf(None, "biases in the MLP (None: as bias)")
    window_pattern: tuple[int | None, ...] = leaf(
        (None,), "attention window of each layer in tokens, None for all, repeated over the layers", at_least=1
    )
    attention_scale: float | None = leaf(None, "factor on attention scores (None: 1 / sqrt(head_dim))", above=0)
    attention_softcap: float | None = leaf(None, "cap * tanh(scores / cap) on attention scores", above=0)
    logit_softcap: float | None = leaf(None, "cap * tanh(logits / cap) on the output", above=0)
    embed_scale: float = leaf(1.0, "factor on the embeddings where they enter the first block", above=0)
    tie_embeddings: bool = leaf(False, "the output matrix is the embedding's transpose")
    dropout: float = leaf(0.0, "probability of dropping after embedding, attention and MLP", at_least=0, below=1)
    from_hf: str | None = leaf(None, "a Hugging Face folder that the architecture and the tokenizer come from")
    scan_layers: bool = leaf(True, "one compiled block, looped (compile time independent of depth), or all unrolled")

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def rotated_width(self) -> int:
        """How many numbers of a head RoPE turns."""
        return int(self.head_width * self.rope_fraction)

    def has_bias(self, part: str) -> bool:
        """Whether the projections of a part ('qkv', 'output' or 'mlp') have biases."""
        own = getattr(self, f"{part}_bias")
        return self.bias if own is None else own

    @property
    def gated(self) -> bool:
        return self.activation in GATED_ACTIVATIONS

    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer, in tokens; None means all."""
        return tuple(self.window_pattern[i % len(self.window_pattern)] for i in range(self.num_layers))


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text in, batches of token ids out."""

    train: tuple[Any, ...] = leaf(
        ("embedded:shakespeare",),
        "paths, globs or URLs of text or tokens, or the packaged text; or a mixture: dict(paths, name, weight) for each source",
    )
    eval: tuple[str, ...] = leaf((), "names as in train, for evaluation; empty: the last eval_fraction of the training text")
    tokenizer: str = leaf("bytes", "'bytes', or the path of a tokenizer's file or of its folder (tokenizer.json and others)")
    content: str = leaf("text", "what a record holds: text, messages, or a prompt with two answers", choices=CONTENTS)
    chat_template: str | None = leaf(None, "Jinja, or a file of it (None: what came with the tokenizer)")
    sequence_length: int = leaf(256, "tokens per example", at_least=1)
    pack: str = leaf(
        "split",
        "split: one stream, cut at every sequence_length; best_fit: whole documents, which do not see each other",
        choices=PACKS,
    )
    seed: int = leaf(0, "seed of the order of examples", at_least=0, at_most=LARGEST_SEED)
    epochs: int | None = leaf(
        None, "passes over the data, after which training ends (None: as many as train.steps needs)", at_least=1
    )
    temperature: float = leaf(1.0, "mixtures: shares are weights (or, without, sizes) to the power of 1 / temperature", above=0)
    stages: tuple[Any, ...] = leaf((), "mixtures: pairs (step, dict(name=weight)): other weights from after that step on")
    on_change: str = leaf(
        "refuse",
        "a resume with other weights, sequence_length or pack: refuse, or continue (docs/data.md says how)",
        choices=("refuse", "continue"),
    )
    eval_fraction: float = leaf(0.1, "share of the training text, at its end, held out for evaluation", at_least=0, below=1)
    text_field: str = leaf("text", "field of a record that holds the text")
    bos: bool = leaf(False, "put the tokenizer's beginning token before documents of text")
    eos: bool = leaf(True, "put the tokenizer's end token between documents of text")
    bos_token: str | None = leaf(None, "the special token that begins documents (None: the tokenizer's own)")
    eos_token: str | None = leaf(None, "the special token that ends documents (None: the tokenizer's own)")
    token_dtype: str = leaf(
        "auto", "flat .bin files: width of an id; auto: by the tokenizer's size", choices=("auto", "uint16", "uint32")
    )
    on_bad_record: str = leaf("fail", "what a record that cannot be read does", choices=("fail", "skip"))
    workers: int = leaf(1, "threads that assemble batches ahead (0: none)", at_least=0)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How gradients change parameters."""

    name: str = leaf("adamw", "optimizer", choices=OPTIMIZERS)
    learning_rate: float = leaf(1e-3, "peak learning rate", at_least=0)
    schedule: str = leaf("cosine", "learning rate over the steps, after warm-up", choices=SCHEDULES)
    warmup_steps: int = leaf(0, "steps over which the rate rises linearly to its peak", at_least=0)
    decay_steps: int | None = leaf(None, "wsd: steps of the final linear decay (None: a fifth of train.steps)", at_least=0)
    final_fraction: float = leaf(0.1, "share of the peak rate left at the last step", at_least=0, at_most=1)
    weight_decay: float = leaf(0.1, "decoupled weight decay, times the learning rate", at_least=0)
    decay_mask: tuple[str, ...] = leaf((r".*/kernel",), "regular expressions (whole paths) of the parameters that decay")
    clip_norm: float | None = leaf(1.0, "largest global gradient norm (None: no clipping)", above=0)
    z_loss: float = leaf(0.0, "weight of the squared log-partition in the loss", at_least=0)
    beta1: float = leaf(0.9, "decay of the first moment (adamw, lion, muon's adam part)", at_least=0, below=1)
    beta2: float = leaf(0.95, "decay of the second moment (adamw, lion, muon's adam part)", at_least=0, below=1)
    epsilon: float = leaf(1e-8, "added to the root of the second moment", above=0)
    momentum: float = leaf(0.95, "momentum of sgd and muon", at_least=0, below=1)
    adam_learning_rate: float | None = leaf(
        None, "muon: peak rate of the parameters that are no matrices of a layer (None: learning_rate)", at_least=0
    )


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """Number formats. Softmax, normalisation and loss are float32 always."""

    params: str = leaf("float32", "dtype of the parameters", choices=DTYPES)
    compute: str = leaf("float32", "dtype of matmuls and activations", choices=DTYPES)
    gradients: str = leaf("float32", "dtype in which gradients are accumulated and reduced", choices=DTYPES)
    optimizer: str = leaf("float32", "dtype of the optimizer's moments", choices=DTYPES)
    loss_scale: str = leaf(
        "auto", "dynamic loss scaling; auto: only when compute is float16", choices=("auto", "dynamic", "none")
    )
    loss_scale_initial: float = leaf(2.0**15, "first loss scale", above=0)
    loss_scale_growth_steps: int = leaf(2000, "finite steps after which the loss scale doubles", at_least=1)

    @property
    def scales_loss(self) -> bool:
        return self.loss_scale == "dynamic" or (self.loss_scale == "auto" and self.compute == "float16")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The training loop."""

    steps: int = leaf(1000, "optimizer steps of the whole run; the schedule spans them", at_least=1)
    stop_at: int | None = leaf(None, "stop and save after this step; the schedule still spans train.steps", at_least=1)
    global_batch_size: int = leaf(16, "examples per step, over all devices", at_least=1)
    gradient_accumulation: int = leaf(1, "microbatches per step", at_least=1)
    seed: int = leaf(0, "seed of the initial parameters and of dropout", at_least=0, at_most=LARGEST_SEED)
    remat: tuple[str, ...] = leaf(
        ("dots",),
        "what the backward pass keeps: none (no recomputation), full, dots (matmul outputs), or names of activations to keep",
    )
    log_every: int = leaf(10, "steps between logged rows (0: never)", at_least=0)
    eval_every: int = leaf(0, "steps between evaluations (0: only at the end)", at_least=0)
    eval_steps: int | None = leaf(None, "batches per evaluation (None: the whole evaluation text, once)", at_least=1)
    sample_every: int = leaf(0, "steps between text samples (0: never)", at_least=0)
    sample_prompt: str = leaf("\n", "prompt of the text samples")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, when, and what a run starts from."""

    every: int = leaf(500, "steps between checkpoints (0: only at the end)", at_least=0)
    every_minutes: float = leaf(
        0.0, "minutes from a checkpoint to the next (0: never); several processes look at logged steps", at_least=0
    )
    keep: int = leaf(2, "newest checkpoints to keep", at_least=1)
    keep_every: int = leaf(0, "keep those of steps that are multiples of this for ever, too (0: none)", at_least=0)
    best_metric: str | None = leaf(
        None, "keep the checkpoint that is best by this figure of an evaluation at its step, too", choices=("eval_loss",)
    )
    best_mode: str = leaf("min", "whether the best is the smallest or the largest", choices=("min", "max"))
    on_save_error: str = leaf(
        "stop", "no room or permission to save: stop the run, or continue without", choices=("stop", "continue")
    )
    asynchronous: bool = leaf(True, "write in the background while training goes on")
    restore_from: str | None = leaf(
        None, "a run directory, checkpoint or Hugging Face folder to start from, when the workdir has none"
    )
    restore: str = leaf("params", "what restore_from gives", choices=("params", "all"))
    reset: tuple[str, ...] = leaf(
        (), "with restore = 'all': what starts anew all the same", choices=("optimizer", "step", "data")
    )
    include: tuple[str, ...] = leaf(
        (), "regular expressions on paths: the parameters that restore_from gives, the others start at random (empty: all)"
    )
    rename: tuple[Any, ...] = leaf(
        (), "pairs (regular expression, replacement) for paths that are called otherwise in restore_from"
    )


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """Where numbers go besides the console and metrics.jsonl."""

    tensorboard: bool = leaf(True, "write TensorBoard event files")
    wandb: str | None = leaf(None, "Weights & Biases project to log to (needs the wandb extra)")
    profile_steps: tuple[int, ...] = leaf((), "first and last step of a profiler trace, e.g. 10,12")


@dataclasses.dataclass(frozen=True)
class FaultsConfig:
    """What to do when numbers go wrong."""

    on_nonfinite: str = leaf(
        "stop",
        "a loss or gradient norm that is not finite: stop the run, skip the update, or rollback to the last checkpoint and past "
        "the data since",
        choices=REACTIONS,
    )
    spike_threshold: float = leaf(
        0.0, "a loss over so many times the running mean of the last ones is a spike (0: none is)", at_least=0
    )
    on_spike: str = leaf("skip", "what a spike does, as on_nonfinite", choices=REACTIONS)
    max_rollbacks: int = leaf(5, "rollbacks of a run, after which the next one stops it", at_least=0)
    replica_check_every: int = leaf(
        0, "steps between comparisons of the copies of parameters and optimizer state, bit by bit (0: never)", at_least=0
    )


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """Several processes. Empty: found from Slurm's, Kubernetes' or the launcher's variables, else one process."""

    coordinator: str | None = leaf(None, "host:port of process 0")
    num_processes: int | None = leaf(None, "number of processes", at_least=1)
    process_id: int | None = leaf(None, "this process, from 0", at_least=0)
    start_timeout: int = leaf(300, "seconds that processes wait for each other at the start", at_least=1)
    heartbeat_timeout: int = leaf(60, "seconds without a sign of life from a process after which the others end", at_least=2)


@dataclasses.dataclass(frozen=True)
class KernelsConfig:
    """Which implementation serves each operation."""

    attention: str = leaf(
        "auto", "attention backend", choices=("auto", "pallas", "jax_triton", "cudnn", "chunked", "reference"))
    cross_entropy: str = leaf(
        "auto", "how the loss is computed: from the logits of some tokens at a time (chunked) or of all (reference)",
        choices=("auto", "chunked", "reference"))
    interpret: bool = leaf(False, "run kernels of our own interpreted, slowly, on any machine (for tests)")


@dataclasses.dataclass(frozen=True)
class Sharding(ShardingConfig):
    """The declaration of `partitioning`, and a name for the values of one."""

    preset: str | None = leaf(None, "a shipped preset or a .py file that mesh and sharding start from (docs/sharding.md)")


@dataclasses.dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig = section(ModelConfig, "the Transformer")
    mesh: MeshConfig = section(MeshConfig, "sizes of the mesh axes")
    sharding: Sharding = section(Sharding, "how arrays lie on the mesh")
    pipeline: PipelineConfig = section(PipelineConfig, "the schedule of a pipeline (mesh.pipe > 1)")
    data: DataConfig = section(DataConfig, "text and tokens")
    optimizer: OptimizerConfig = section(OptimizerConfig, "the optimizer and its schedule")
    precision: PrecisionConfig = section(PrecisionConfig, "number formats")
    train: TrainConfig = section(TrainConfig, "the training loop")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "checkpoints")
    log: LogConfig = section(LogConfig, "logs")
    faults: FaultsConfig = section(FaultsConfig, "bad numbers")
    distributed: DistributedConfig = section(DistributedConfig, "several processes")
    kernels: KernelsConfig = section(KernelsConfig, "kernel backends")


def to_dict(config: Any) -> dict[str, Any]:
    """A declaration as nested plain dicts (tuples stay tuples), the inverse of `to_config`."""
    return dataclasses.asdict(config)


def default_config():
    """The defaults as a `ml_collections.ConfigDict`, for config files to change."""
    import ml_collections  # not needed by those who read dataclasses only

    return ml_collections.ConfigDict(to_dict(Config()), type_safe=False)


def to_config(values: Any) -> Config:
    """Reads a ConfigDict (or any nested mapping) into the dataclasses, with the preset that it names in its place, and checks
    that the values fit each other.

    Raises:
      DeclarationError: naming the key, what was found and what was expected.
    """
    config = read(Config, with_architecture(with_preset(to_dict(values) if isinstance(values, Config) else values)))
    _check(config)
    return config


def with_preset(values: Any) -> Any:
    """The values with config.sharding.preset expanded; see `jaxlm.presets`."""
    return presets.under(values, {name: dataclasses.asdict(getattr(Config(), name)) for name in presets.SECTIONS})


def with_architecture(values: Any) -> Any:
    """The values with config.model.from_hf expanded; see `jaxlm.huggingface.configured`."""
    from jaxlm.huggingface import configured

    return configured.under(values, {"model": dataclasses.asdict(ModelConfig()), "data": dataclasses.asdict(DataConfig())})


def _check(config: Config) -> None:
    """Conditions between keys; those on a single key are declared with it."""
    model, train, data = config.model, config.train, config.data
    if not model.window_pattern:
        raise DeclarationError("config.model.window_pattern is empty; expected the windows of some layers, such as (None,).")
    if model.num_heads % model.kv_heads:
        divisors = [d for d in range(1, model.num_heads + 1) if model.num_heads % d == 0]
        raise DeclarationError(
            f"config.model.num_kv_heads = {model.kv_heads} does not divide num_heads = {model.num_heads}; "
            f"values that do: {', '.join(map(str, divisors))}."
        )
    if model.head_dim is None and model.embed_dim % model.num_heads:
        raise DeclarationError(
            f"config.model.embed_dim = {model.embed_dim} is not a multiple of num_heads = {model.num_heads}; "
            "change one of them, or set config.model.head_dim."
        )
    if model.position == "rope" and (model.rotated_width % 2 or not model.rotated_width):
        raise DeclarationError(
            f"RoPE turns pairs of numbers, but {model.rotated_width} of a head's {model.head_width} are to be turned "
            "(config.model.rope_fraction); make that an even number above 0."
        )
    if model.norm_unit_offset and model.norm != "rmsnorm":
        raise DeclarationError(f"config.model.norm_unit_offset is for RMSNorm, but norm = {model.norm!r}.")
    if data.sequence_length > model.max_positions:
        raise DeclarationError(
            f"config.data.sequence_length = {data.sequence_length} is longer than config.model.max_positions = "
            f"{model.max_positions}; shorten the one or raise the other."
        )
    if train.global_batch_size % train.gradient_accumulation:
        raise DeclarationError(
            f"config.train.global_batch_size = {train.global_batch_size} is not a multiple of "
            f"gradient_accumulation = {train.gradient_accumulation}."
        )
    if config.optimizer.warmup_steps > train.steps:
        raise DeclarationError(
            f"config.optimizer.warmup_steps = {config.optimizer.warmup_steps} exceeds train.steps = {train.steps}; "
            "shorten the warm-up, or train for longer."
        )
    _check_selection(config.checkpoint)
    if 0 < config.faults.spike_threshold <= 1:
        raise DeclarationError(
            f"config.faults.spike_threshold = {config.faults.spike_threshold} would call ordinary losses spikes; expected a "
            "number above 1, such as 2, or 0 for none."
        )
    if len(config.log.profile_steps) not in (0, 2) or sorted(config.log.profile_steps) != list(config.log.profile_steps):
        raise DeclarationError(
            f"config.log.profile_steps = {config.log.profile_steps!r}; expected the first and the last step, e.g. 10,12."
        )


def _check_selection(checkpoint: CheckpointConfig) -> None:
    for i, pair in enumerate(checkpoint.rename):
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(word, str) for word in pair):
            raise DeclarationError(
                f"config.checkpoint.rename[{i}] = {pair!r}; expected a pair (regular expression, replacement), such as "
                "('blocks/(.*)', r'layers/\\1')."
            )
    for key, patterns in (("include", checkpoint.include), ("rename", [pair[0] for pair in checkpoint.rename])):
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise DeclarationError(f"config.checkpoint.{key}: {pattern!r} is no regular expression: {error}.") from None
    if checkpoint.reset and checkpoint.restore != "all":
        raise DeclarationError(
            f"config.checkpoint.reset = {checkpoint.reset!r} starts parts of the whole state anew, but restore = "
            f"{checkpoint.restore!r} takes the parameters alone; set restore = 'all'."
        )
    if checkpoint.include and checkpoint.restore == "all":
        raise DeclarationError(
            "config.checkpoint.include takes some parameters from restore_from, but restore = 'all' takes the whole state; "
            "set restore = 'params'."
        )
