"""An experiment: model x data x schedule x arms x seeds. YAML files hold values only; defaults live here.

Source of the toy's values: measurements of this project (README, section "The toy"); of GRPO's: the paper's setting.
Differs from verl's YAML tree in that a key means one thing, has one default, and an unknown key is an error.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from quads.config.arms import Frozen
from quads.config.diagnostics import Diagnostics
from quads.config.rates import Rates


class Checkpoint(Frozen):
    """A pretrained model in place of one made here: from the hub at a pinned revision, or from a folder."""

    repo: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$", description="owner/name on the Hugging Face hub")
    revision: str | None = Field(None, pattern=r"^[0-9a-f]{40}$", description="full commit: a branch would move")
    path: str | None = Field(None, description="a local Hugging Face checkpoint folder")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.repo is None) == (self.path is None):
            raise ValueError("model.checkpoint needs either repo (with revision) or path, not both and not neither")
        if (self.repo is None) != (self.revision is None):
            raise ValueError("model.checkpoint.repo and model.checkpoint.revision belong together: pin the commit")
        return self


class Model(Frozen):
    """A tiny Qwen3-MoE, made here; its vocabulary is the tokenizer's, so that no padding row pollutes log-probs.

    With `checkpoint` a pretrained model takes its place: no size is read, nothing is warmed up, nothing is injected.
    """

    checkpoint: Checkpoint | None = None
    hidden: int = Field(64, gt=0, description="D; a multiple of 16 (NVFP4 block)")
    layers: int = Field(2, gt=0)
    heads: int = Field(4, gt=0)
    kv_heads: int = Field(2, gt=0)
    head_dim: int = Field(32, ge=32, description="vLLM's CPU attention serves 32, 64, 80, 96, 112, 128 and more")
    experts: int = Field(8, gt=1)
    experts_per_token: int = Field(2, gt=0)
    expert_hidden: int = Field(32, gt=0, description="F of one expert; a multiple of 16 (NVFP4 block)")
    rope_theta: float = 10000.0

    @model_validator(mode="after")
    def _blocks_of_16(self) -> Self:
        for name in ("hidden", "expert_hidden"):
            got = getattr(self, name)
            if got % 16:
                below, above = got - got % 16, got - got % 16 + 16
                raise ValueError(
                    f"model.{name}={got} is not a multiple of 16, the NVFP4 block along K; "
                    f"use {f'{below} or {above}' if below else above}"
                )
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}")
        return self

    @model_validator(mode="after")
    def _sizes_or_checkpoint(self) -> Self:
        made = {k: v for k, v in self.model_dump().items() if k != "checkpoint"}
        idle = [k for k, v in made.items() if v != type(self).model_fields[k].default]
        if self.checkpoint is not None and idle:
            raise ValueError(f"model.checkpoint brings its own sizes, but model sets {', '.join(idle)}; remove them")
        return self


class Data(Frozen):
    """Arithmetic chains: `^3+5*2-7=` is answered by the running results modulo 10 and an end mark.

    With `sets` the prompts are those of pinned training sets (quads.data.training_sets) after decontamination against
    every pinned test set; `operations` and `operators` are then not read.
    """

    sets: tuple[str, ...] = Field((), description="pinned training sets, e.g. deepmath_103k; empty: chains made here")
    tests_per_program: int = Field(15, gt=0, description="tests that a program of a code set is rewarded by")
    operations: int = Field(6, ge=1, le=12, description="operations per prompt; the answer has as many digits")
    operators: str = Field("+-*", pattern=r"^[+\-*]+$")
    train_prompts: int = Field(1920, gt=0, description="must cover steps x prompts per step: no prompt repeats")
    eval_prompts: int = Field(384, gt=0)
    calibration_prompts: int = Field(64, gt=0, description="prompts with answers that calibrate static RAC masks")
    seed: int = 1000

    @model_validator(mode="after")
    def _sets_once(self) -> Self:
        if len(set(self.sets)) != len(self.sets):
            raise ValueError(f"data.sets lists a set twice: {list(self.sets)}; held-out prompts would be trained on")
        return self


class Outliers(Frozen):
    """Function-preserving outlier channels INJECTED into the warm checkpoint (gain x strength, next matrix / strength).

    Trained MoEs have such channels; a model this small has none. Strength 1 switches the injection off.
    """

    strength: float = Field(12.0, ge=1.0)
    channels_per_norm: int = Field(2, ge=1)
    seed: int = 100


class Warmup(Frozen):
    """Supervised warm-up that leaves something for RL to sharpen: first clean, then noisy demonstrations."""

    clean_steps: int = Field(260, ge=0)
    noisy_steps: int = Field(100, ge=0)
    batch: int = Field(64, gt=0)
    clean_lr: float = Field(5e-3, gt=0)
    noisy_lr: float = Field(2e-3, gt=0)
    noise: float = Field(0.12, ge=0, lt=1, description="chance that a digit of the chain is replaced at random")
    seed: int = 0
    outliers: Outliers = Outliers()


class Grpo(Frozen):
    """GRPO schedule; every field is handed to verl explicitly, so that no default of verl decides a result."""

    steps: int = Field(60, gt=0)
    prompts_per_step: int = Field(12, gt=0)
    samples_per_prompt: int = Field(8, gt=1)
    mini_batch_prompts: int = Field(12, gt=0)
    epochs_per_batch: int = Field(1, gt=0)
    lr: float = Field(5e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="bound on the ratio of negative advantages; null is off (verl's own default is 3.0)",
    )
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    temperature: float = Field(1.0, gt=0)
    max_prompt_tokens: int = Field(16, gt=0)
    max_response_tokens: int = Field(8, gt=0)
    evaluate_every: int | None = Field(
        None, gt=0, description="steps between accuracies on the held-out prompts; null: only at the start and the end"
    )
    save_every: int = Field(20, gt=0, description="steps; a killed run loses at most this many")
    stop_on_collapse: bool = Field(
        False, description="end a run at the step where it collapses or diverges (diagnostics.collapse says when)"
    )

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.prompts_per_step % self.mini_batch_prompts:
            raise ValueError(
                f"grpo.prompts_per_step={self.prompts_per_step} is not a multiple of "
                f"grpo.mini_batch_prompts={self.mini_batch_prompts}"
            )
        return self


class Benchmarks(Frozen):
    """What an arm is compared on, beside its own held-out chains; the macro average weighs every name alike.

    chain_depth<d>, chain_code: made offline (quads.data.toy_benchmarks); other names: pinned sets
    (quads.data.benchmarks).
    """

    names: tuple[str, ...] = ("chain_depth2", "chain_depth4", "chain_depth6", "chain_code")
    problems: int = Field(96, gt=0, description="problems of each chain_depth benchmark")
    code_problems: int = Field(12, gt=0, description="problems of chain_code: each distinct program costs 0.2 s")
    seed: int = 5000

    @model_validator(mode="after")
    def _once(self) -> Self:
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"benchmarks.names lists a name twice: {list(self.names)}")
        return self


class Evaluation(Frozen):
    """pass@1 = mean over samples_per_problem samples, one seed per (problem, sample)."""

    benchmarks: Benchmarks = Benchmarks()
    samples: dict[str, int] = Field(
        default={}, description="samples per problem by benchmark; unset: 32 for pinned mathematics, 8 for pinned code"
    )
    max_response_tokens: int | None = Field(None, gt=0, description="null: grpo.max_response_tokens")
    max_prompt_tokens: int | None = Field(None, gt=0, description="null: grpo.max_prompt_tokens")
    noninferiority_margin: float = Field(
        2.0, gt=0, description="points an arm may lie below BF16; fixed before the runs, never after seeing them"
    )
    permutations: int = Field(9999, gt=0, description="sign flips of the paired test, where it is not enumerated")
    sandbox: Literal["bwrap", "namespaces", "rlimits"] = Field(
        "bwrap", description="weakest isolation accepted for generated programs; its name is in every report"
    )

    samples_per_problem: int = Field(4, gt=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    engines: tuple[Literal["own", "bf16"], ...] = Field(
        ("own", "bf16"), description="own: the arm's rollout mode; bf16: the master weights rounded to BF16"
    )
    bootstrap: int = Field(2000, gt=0, description="resamples over problems")
    confidence: float = Field(0.95, gt=0, lt=1)
    seed: int = 0


class Runtime(Frozen):
    """Where and how the stack runs; the code is the same at every scale."""

    device: Literal["cpu", "cuda"] = "cpu"
    gpus_per_node: int = Field(1, gt=0)
    nodes: int = Field(1, gt=0)
    engine_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    attention_backend: str | None = Field(None, description="vLLM's name; null leaves the choice to vLLM")
    agent_loop: Literal["inline", "verl"] = Field(
        "inline",
        description="inline: one process, one replica, single turn; verl: the stock agent-loop workers",
    )
    micro_batch_sequences: int = Field(96, gt=0, description="sequences per trainer micro-batch and device, at most")
    max_sequences: int = Field(96, gt=0, description="sequences the engine runs at once")
    max_batched_tokens: int = Field(2048, gt=0)
    kv_cache_mib: int = Field(32, gt=0)
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    threads: int = Field(1, gt=0, description="OpenMP threads per process on CPU")
    attention: Literal["eager", "sdpa", "flash_attention_2"] = Field("eager", description="of the trainer")
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the trainer's forward and backward; master weights and gradients' sums are float32"
    )
    gradient_checkpointing: bool = False
    remove_padding: bool = Field(False, description="packed sequences in the trainer; needs flash_attention_2")
    tokens_per_gpu: int | None = Field(
        None, gt=0, description="dynamic micro-batches of at most this many tokens; null: micro_batch_sequences"
    )
    chunked_head: bool = Field(
        False,
        description="trainer's log-probs and entropy by chunks of tokens, without a float32 copy of all logits; sums "
        "in another order. For large vocabularies without flash-attn",
    )
    offload: bool = Field(False, description="trainer's parameters and optimizer state on the host between phases")
    sleep: bool = Field(False, description="the engine frees weights and cache while the trainer updates")
    object_store_mib: int | None = Field(
        None,
        gt=0,
        description="Ray's shared memory for one training session; null: 191 on CPU, Ray's own choice (30 % of the "
        "machine's memory) on GPU, which several sessions on one machine cannot all have",
    )
    trainer_backend: Literal["reference", "triton"] = Field(
        "reference", description="trainer's quantizers: torch, or Triton kernels with the same bits (CUDA)"
    )
    trainer_experts: Literal["loop", "grouped"] = Field(
        "loop", description="trainer's experts one by one, or all in one grouped product (compute_dtype: bfloat16)"
    )
    weight_cache: Literal["off", "on", "verify"] = Field(
        "on",
        description="quantize the trainer's weights once per optimizer step; takes one unsharded copy of them in "
        "compute_dtype per process. verify: recompute at every use and stop when it differs",
    )
    rollout_backend: Literal["reference", "triton", "native", "cutlass"] = Field(
        "reference",
        description="rollout engine's products: torch in float32, the definition; Triton kernels that emulate on BF16 "
        "units; FP4 units through Triton (native) or vLLM's ops (cutlass). They add and round in different orders, so "
        "the choice can change a result",
    )
    rollout_graphs: bool = Field(
        False, description="the engine captures decode steps in CUDA graphs; needs a backend that is not reference"
    )
    memory_gib: float = Field(5.0, gt=0, description="what one training job may take; the scheduler packs by it")

    @field_validator("weight_cache", mode="before")
    @classmethod
    def _yaml_on_off(cls, value: object) -> object:
        # YAML reads a bare on or off as a truth value.
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _trainer_kernels(self) -> Self:
        if self.trainer_backend == "triton" and self.device == "cpu":
            raise ValueError("runtime.trainer_backend=triton needs runtime.device=cuda; use reference on CPU")
        if self.trainer_experts == "grouped" and self.compute_dtype != "bfloat16":
            raise ValueError(
                f"runtime.trainer_experts=grouped multiplies bfloat16, compute_dtype is {self.compute_dtype}; use loop"
            )
        return self

    @model_validator(mode="after")
    def _rollout_kernels(self) -> Self:
        backend = self.rollout_backend
        if backend != "reference" and self.device == "cpu":
            raise ValueError(f"runtime.rollout_backend={backend} needs runtime.device=cuda; use reference on CPU")
        if backend != "reference" and self.engine_dtype != "bfloat16":
            raise ValueError(
                f"runtime.rollout_backend={backend} serves bfloat16, engine_dtype is {self.engine_dtype}; use reference"
            )
        if self.rollout_graphs and backend == "reference":
            raise ValueError(
                "runtime.rollout_graphs=true needs another rollout_backend than reference, which reads values on the "
                "host, which a captured graph would not repeat"
            )
        return self

    def micro_batch(self, mini_batch: int) -> int:
        """Sequences of one micro-batch on one device, where all devices share `mini_batch` sequences."""
        return max(1, min(self.micro_batch_sequences, mini_batch // (self.nodes * self.gpus_per_node)))

    @model_validator(mode="after")
    def _replicas(self) -> Self:
        if self.nodes * self.gpus_per_node > 1 and self.agent_loop == "inline":
            raise ValueError(
                f"runtime.agent_loop=inline serves one engine replica, {self.nodes} x {self.gpus_per_node} devices "
                "have more; use agent_loop: verl"
            )
        return self

    @model_validator(mode="after")
    def _packing(self) -> Self:
        if self.remove_padding and self.attention != "flash_attention_2":
            raise ValueError(
                f"runtime.remove_padding packs sequences, which attention={self.attention!r} would let attend to each "
                "other; use attention: flash_attention_2"
            )
        return self


class Tracking(Frozen):
    """MLflow. An unreachable store stops the run; `enabled: false` is the only way to go without."""

    enabled: bool = True
    uri: str = "sqlite:///results/mlflow.db"
    artifacts: str = "results/mlartifacts"
    experiment: str = "quads"
    upload_checkpoint_mib: float = Field(
        64.0, ge=0, description="larger checkpoints are registered by their place, not copied into the artifact store"
    )


class Experiment(Frozen):
    """One YAML file under configs/."""

    name: str = Field(pattern=r"^[a-z0-9_]+$", description="file stem under configs/ and folder under results/")
    title: str
    arms: tuple[str, ...] = Field(min_length=1, description="file stems under configs/arms; `snakemake NAME`")
    more_arms: tuple[str, ...] = Field((), description="added by `snakemake NAME_all`")
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    model: Model = Model()
    data: Data = Data()
    warmup: Warmup = Warmup()
    grpo: Grpo = Grpo()
    evaluation: Evaluation = Evaluation()
    runtime: Runtime = Runtime()
    tracking: Tracking = Tracking()
    diagnostics: Diagnostics = Diagnostics()
    rates: Rates | None = Field(None, description="null: `snakemake -n` prints no estimate")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.data.sets and self.model.checkpoint is None:
            raise ValueError(
                "data.sets hold text, the model made here knows only symbols of chains; set model.checkpoint too"
            )
        if self.model.checkpoint is not None and not self.data.sets:
            raise ValueError(
                "model.checkpoint brings its own tokenizer, arithmetic chains need the toy's; set data.sets too"
            )
        need = self.grpo.steps * self.grpo.prompts_per_step
        if self.data.train_prompts < need:
            raise ValueError(
                f"data.train_prompts={self.data.train_prompts} is less than grpo.steps x prompts_per_step = {need}: "
                f"prompts would repeat; raise data.train_prompts to {need} or more"
            )
        samples = self.grpo.mini_batch_prompts * self.grpo.samples_per_prompt
        ranks = self.runtime.nodes * self.runtime.gpus_per_node
        micro = self.runtime.micro_batch(samples)
        if self.runtime.tokens_per_gpu is None and (samples % ranks or samples % (ranks * micro)):
            raise ValueError(
                f"a mini-batch of {samples} sequences on {ranks} device(s) is not a multiple of "
                f"runtime.micro_batch_sequences={micro}; choose a divisor of {samples // ranks}"
            )
        fits = self.data.operations + 2
        if not self.data.sets and self.grpo.max_response_tokens < fits:
            raise ValueError(
                f"grpo.max_response_tokens={self.grpo.max_response_tokens} cannot tell a finished answer from a "
                f"cut one: {self.data.operations} digits, the end mark and one to spare need {fits}"
            )
        for name, values in (("arms", self.arms + self.more_arms), ("seeds", self.seeds)):
            if len(set(values)) != len(values):
                raise ValueError(f"{name} lists a value twice: {list(values)}")
        return self
