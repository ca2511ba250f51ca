"""Every setting, once: its name, type, default, bound and help.

Each section is a frozen msgspec struct; unknown keys are refused by the loader (`load.py`),
relations between settings are checked in `checks.py`. Units are in the names: `_s` seconds,
`_bytes`, `_tokens`, `_every` steps.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


def _text(help: str, **bounds) -> Meta:
    return Meta(description=help, **bounds)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: immutable, keyword only, unknown keys refused."""


class RunConfig(Section, frozen=True):
    """The run as a whole."""

    name: Annotated[str, _text("Name shown in trackers and on the console.")] = "run"
    dir: Annotated[str, _text("Run directory: resolved config, metrics.jsonl, report.png, model/.")] = "runs/run"
    seed: Annotated[int, _text("Seeds data order, sampling and initialisation.", ge=0)] = 0
    steps: Annotated[int, _text("Steps to train; one step consumes one batch and makes one policy version. 0: only evaluate.", ge=0)] = 100
    stop_at_accuracy: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        _text("End the run early once held-out accuracy reaches this share; off when absent."),
    ] = None
    stall_timeout_s: Annotated[float, _text("Without any progress for this long the run ends with an error that names the wait.", gt=0)] = 600.0
    save_model: Annotated[bool, _text("Write the final weights in Hugging Face form to <dir>/model.")] = True
    resume: Annotated[
        Literal["auto", "never"] | Annotated[int, Meta(ge=0)],
        _text("auto: go on from the newest complete checkpoint in <dir>; never: start over; a step: go back to its checkpoint, this once."),
    ] = "auto"
    fork_from: Annotated[
        str | None,
        _text("RUN or RUN@STEP: a run in a new <dir> starts from that run's checkpoint, with its step, optimizer and buffered groups."),
    ] = None


class ModelConfig(Section, frozen=True):
    """The policy."""

    path: Annotated[str, _text("Folder with a Hugging Face causal LM and its tokenizer (safetensors, config.json).", min_length=1)]
    dtype: Annotated[Literal["float32", "bfloat16"], _text("Compute type of the learner and of saved weights; its parameters, optimizer and reductions are float32 always.")] = "float32"
    attention: Annotated[
        Literal["auto", "sdpa", "eager", "flash_attention_2"],
        _text("Attention kernel; auto and sdpa read a prompt once for its whole group where the model allows it, the others pad one sequence a row."),
    ] = "auto"
    gradient_checkpointing: Annotated[bool, _text("Recompute activations in the backward pass: less memory, about a third more time.")] = False


class DataConfig(Section, frozen=True):
    """Where problems come from."""

    path: Annotated[str | None, _text("A .parquet or .jsonl file of problems; absent for environments that pose their own.")] = None
    eval_path: Annotated[str | None, _text("File of held-out problems; absent: `eval_problems` are split off `path`, or posed by the environment.")] = None
    eval_problems: Annotated[int, _text("Number of held-out problems, never trained on.", ge=0)] = 128
    prompt_column: Annotated[str, _text("Column with the prompt: text, or a list of {role, content} messages.")] = "prompt"
    answer_column: Annotated[str | None, _text("Column with the reference answer; absent when the reward needs none.")] = "answer"
    system_prompt: Annotated[str | None, _text("System message put before every prompt that is rendered with a chat template.")] = None
    chat_template: Annotated[
        Literal["auto", "always", "never"],
        _text("Render prompts with the tokenizer's chat template; auto: when the tokenizer has one."),
    ] = "auto"
    max_prompt_tokens: Annotated[
        int,
        _text("Longer prompts (as rendered) are dropped and counted, as are those too long for model and completion.", ge=1),
    ] = 1024
    shuffle: Annotated[bool, _text("Shuffle problems in each epoch, seeded by run.seed.")] = True
    epochs: Annotated[Annotated[int, Meta(ge=1)] | None, _text("Passes over the data; absent: as many as the steps need.")] = None


class ArithmeticEnvironment(Section, frozen=True, tag="arithmetic", tag_field="type"):
    """Procedural arithmetic: seeded, unlimited; reward 1 when the answer is right."""

    kinds: Annotated[
        tuple[Literal["sum", "difference", "product", "word"], ...],
        _text("Kinds of problem, mixed evenly.", min_length=1),
    ] = ("sum",)
    max_operand: Annotated[int, _text("Operands are 0..max_operand.", ge=1)] = 9
    style: Annotated[Literal["plain", "question"], _text("plain: '3+4='; question: a sentence for a chat model.")] = "plain"
    match: Annotated[
        Literal["exact", "last_integer"],
        _text("exact: the completion is the answer; last_integer: the completion's last integer is."),
    ] = "exact"


class MathEnvironment(Section, frozen=True, tag="math", tag_field="type"):
    """Mathematical answers, compared by math-verify; needs data.path."""

    instruction: Annotated[str | None, _text("Text appended to each prompt, such as how to mark the final answer.")] = None
    answer_format: Annotated[
        Literal["auto", "boxed", "gsm8k", "last_number"],
        _text("Where the answer stands in a completion; auto: boxed, else after ####, else the last number."),
    ] = "auto"


class ExactMatchEnvironment(Section, frozen=True, tag="exact_match", tag_field="type"):
    """Reward 1 when the completion equals the answer; needs data.path."""

    strip: Annotated[bool, _text("Ignore surrounding white space.")] = True
    ignore_case: Annotated[bool, _text("Ignore case.")] = False


class FunctionEnvironment(Section, frozen=True, tag="function", tag_field="type"):
    """The user's own reward function; needs data.path."""

    reward: Annotated[str, _text("'rewards.py:score' or 'package.module:score'; sync or async, batch or single.", min_length=1)]
    batch: Annotated[bool, _text("The function takes lists and returns a list.")] = False


Environment = ArithmeticEnvironment | MathEnvironment | ExactMatchEnvironment | FunctionEnvironment


class RewardConfig(Section, frozen=True):
    """How rewards are run: in worker processes that are killed at their timeout."""

    workers: Annotated[int, _text("Reward worker processes per generator.", ge=1)] = 1
    timeout_s: Annotated[float, _text("A reward that takes longer is killed; the member's status is failed.", gt=0)] = 10.0
    max_batch: Annotated[int, _text("Most completions scored by one call of a batch reward.", ge=1)] = 16
    max_attempts: Annotated[int, _text("Attempts at a member before it is dropped and counted.", ge=1)] = 3


class SamplingConfig(Section, frozen=True):
    """How completions are sampled for training. The learner's values rule; generators receive them with each lease."""

    group_size: Annotated[int, _text("Trajectories per problem.", ge=1)] = 8
    max_completion_tokens: Annotated[int, _text("Longest completion.", ge=1)] = 256
    temperature: Annotated[float, _text("Sampling temperature; behavior logprobs include it.", gt=0)] = 1.0
    top_p: Annotated[float, _text("Must be 1 for training: a smaller value changes the behavior distribution.", gt=0, le=1)] = 1.0
    max_refills: Annotated[float, _text("Dynamic sampling (DAPO, arXiv:2503.14476): groups whose rewards are all equal are dropped and refilled, at most this many times batch_groups for a batch; beyond that they train with zero advantage. 0: none.", ge=0)] = 0.0
    stop: Annotated[tuple[str, ...], _text("Texts that end a completion; each must be one token of the tokenizer.")] = ()


class StalenessConfig(Section, frozen=True):
    """How old training data may be, and how the bound is kept (docs/staleness.md)."""

    max_staleness: Annotated[int, _text("Bound on (step - 1) - version of every token in the loss; 0 is exact synchronous training.", ge=0)] = 2
    publish_every: Annotated[int, _text("Steps between publications of new weights.", ge=1)] = 1
    overdue: Annotated[
        Literal["mask", "wait", "keep"],
        _text("Tokens older than max_staleness when their batch is formed: leave the loss (mask), cannot occur because the learner waits (wait), or stay (keep)."),
    ] = "mask"
    reorder_window: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _text("With overdue='wait': tickets may be trained this far ahead of the oldest unresolved one; default batch_groups."),
    ] = None


class GrpoAdvantage(Section, frozen=True, tag="grpo", tag_field="type"):
    """(r - mean) / (std + eps) in each group (DeepSeekMath, arXiv:2402.03300)."""

    std: Annotated[Literal["sample", "population", "none"], _text("Deviation that divides; none is Dr.GRPO (arXiv:2503.20783).")] = "sample"
    eps: Annotated[float, _text("Added to the deviation.", ge=0)] = 1e-4


class RlooAdvantage(Section, frozen=True, tag="rloo", tag_field="type"):
    """r minus the mean of the other members (arXiv:2402.14740)."""


class OpoAdvantage(Section, frozen=True, tag="opo", tag_field="type"):
    """r minus the length-weighted mean of the group, the baseline of least variance (arXiv:2505.23585)."""


class ReinforcePlusPlusAdvantage(Section, frozen=True, tag="reinforce_plus_plus", tag_field="type"):
    """r, whitened over all members of the batch (arXiv:2501.03262)."""

    baseline: Annotated[
        Literal["none", "group"],
        _text("group: the group's mean is subtracted first (REINFORCE++-baseline)."),
    ] = "group"
    eps: Annotated[float, _text("Added to the batch's population deviation.", ge=0)] = 1e-4


class RemaxAdvantage(Section, frozen=True, tag="remax", tag_field="type"):
    """r minus the reward of a greedy completion of the same problem, one more completion per group (arXiv:2310.10505)."""


Advantage = GrpoAdvantage | RlooAdvantage | OpoAdvantage | ReinforcePlusPlusAdvantage | RemaxAdvantage


class PpoLoss(Section, frozen=True, tag="ppo", tag_field="type"):
    """PPO's clipped surrogate against the behavior policy (arXiv:1707.06347)."""

    clip_low: Annotated[float, _text("Lower clip distance: ratio >= 1 - clip_low.", ge=0, le=1)] = 0.2
    clip_high: Annotated[float, _text("Upper clip distance: ratio <= 1 + clip_high.", ge=0)] = 0.2
    dual_clip: Annotated[Annotated[float, Meta(gt=1)] | None, _text("Cap of ratio * |A| for negative advantages (arXiv:1912.09729); off when absent.")] = None


class DecoupledPpoLoss(Section, frozen=True, tag="decoupled_ppo", tag_field="type"):
    """PPO clipped around the proximal policy, times the behavior weight (arXiv:2110.00641, arXiv:2505.24298)."""

    clip_low: Annotated[float, _text("Lower clip distance of the proximal ratio.", ge=0, le=1)] = 0.2
    clip_high: Annotated[float, _text("Upper clip distance of the proximal ratio.", ge=0)] = 0.2
    dual_clip: Annotated[Annotated[float, Meta(gt=1)] | None, _text("Cap of ratio * |A| for negative advantages; off when absent.")] = None


class ReinforceLoss(Section, frozen=True, tag="reinforce", tag_field="type"):
    """-A * logprob, times the behavior weight (Williams 1992)."""


class TruncatedIsLoss(Section, frozen=True, tag="truncated_is", tag_field="type"):
    """Policy gradient times min(pi / mu, cap), which stays a constant factor (IMPALA, arXiv:1802.01561)."""

    cap: Annotated[float, _text("Largest importance ratio.", gt=0)] = 2.0


class CispoLoss(Section, frozen=True, tag="cispo", tag_field="type"):
    """-A * logprob times the clipped importance ratio, a constant: clipped tokens keep a gradient (arXiv:2506.13585)."""

    clip_low: Annotated[float, _text("Lower clip distance of pi / mu; 1 is no lower bound.", ge=0, le=1)] = 1.0
    clip_high: Annotated[float, _text("Upper clip distance of pi / mu.", ge=0)] = 0.28


class GspoLoss(Section, frozen=True, tag="gspo", tag_field="type"):
    """PPO's clip on the sequence's geometric mean ratio, times the behavior weight (arXiv:2507.18071)."""

    clip_low: Annotated[float, _text("Lower clip distance of the sequence ratio.", ge=0, le=1)] = 3e-4
    clip_high: Annotated[float, _text("Upper clip distance of the sequence ratio.", ge=0)] = 4e-4


class GmpoLoss(Section, frozen=True, tag="gmpo", tag_field="type"):
    """The sequence's geometric mean of clipped token ratios, times the behavior weight (arXiv:2507.20673)."""

    clip_low: Annotated[float, _text("Smallest log of a token's proximal ratio for negative advantages, negated; nats.", ge=0)] = 0.4
    clip_high: Annotated[float, _text("Largest log of a token's proximal ratio for positive advantages; nats.", ge=0)] = 0.4


class SapoLoss(Section, frozen=True, tag="sapo", tag_field="type"):
    """A sigmoid gate on the proximal ratio in place of the clip, times the behavior weight (arXiv:2511.20347)."""

    tau_positive: Annotated[float, _text("Sharpness of the gate for positive advantages.", gt=0)] = 1.0
    tau_negative: Annotated[float, _text("Sharpness of the gate for negative advantages.", gt=0)] = 1.05


class IcePopLoss(Section, frozen=True, tag="icepop", tag_field="type"):
    """-w r A where low <= w <= high, else 0; w = prox / mu, r = pi / prox (arXiv:2510.18855)."""

    low: Annotated[float, _text("Smallest prox / mu that trains.", ge=0)] = 0.5
    high: Annotated[float, _text("Largest prox / mu that trains.", gt=0)] = 5.0


class ToprLoss(Section, frozen=True, tag="topr", tag_field="type"):
    """-A * logprob, for negative advantages times the truncated ratio pi / mu (arXiv:2503.14286)."""

    level: Annotated[
        Literal["token", "sequence", "geometric"],
        _text("The ratio per token, its product over the sequence (the paper's), or its geometric mean."),
    ] = "sequence"
    cap: Annotated[float, _text("Largest ratio of a negative trajectory.", gt=0)] = 1.0


class DppoLoss(Section, frozen=True, tag="dppo", tag_field="type"):
    """-r A, r = pi / mu, without the tokens that moved further than a divergence allows (arXiv:2602.04879)."""

    divergence: Annotated[
        Literal["tv", "kl"],
        _text("Between mu and pi as to the sampled token or any other: total variation or KL."),
    ] = "tv"
    threshold: Annotated[float, _text("Tokens beyond it do not move further away.", gt=0)] = 0.15


Loss = (
    PpoLoss
    | DecoupledPpoLoss
    | ReinforceLoss
    | TruncatedIsLoss
    | CispoLoss
    | GspoLoss
    | GmpoLoss
    | SapoLoss
    | IcePopLoss
    | ToprLoss
    | DppoLoss
)


class Rejection(Section, frozen=True):
    """Tokens or sequences whose estimated KL(mu || prox) lies outside the bounds leave the loss."""

    estimator: Annotated[
        Literal["k1", "k2", "k3"],
        _text("With r = prox / mu: -log r, (log r)^2 / 2, or r - 1 - log r."),
    ] = "k3"
    level: Annotated[
        Literal["token", "sequence_mean", "sequence_sum", "sequence_max"],
        _text("The token alone, or its whole sequence by the mean, sum or largest of its tokens."),
    ] = "token"
    low: Annotated[float | None, _text("Smallest estimate that stays; absent: none.")] = None
    high: Annotated[float | None, _text("Largest estimate that stays; absent: none.")] = None

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ValueError("a rejection needs `low` or `high`, else it rejects nothing")


class CorrectionConfig(Section, frozen=True):
    """The behavior weight pi_prox / mu that corrects for staleness and mismatch."""

    level: Annotated[Literal["none", "token", "sequence", "geometric"], _text("none: weight 1; per token; product over the sequence; its geometric mean.")] = "token"
    mode: Annotated[Literal["truncate", "mask"], _text("truncate: min(weight, cap); mask: outside [floor, cap] the token leaves the loss.")] = "truncate"
    cap: Annotated[float, _text("Largest weight.", gt=0)] = 5.0
    floor: Annotated[float, _text("Smallest weight that mode='mask' keeps.", ge=0)] = 0.0
    rejections: Annotated[
        tuple[Rejection, ...],
        _text("What leaves the loss by its divergence, whatever level and mode are; all must agree to keep."),
    ] = ()
    veto: Annotated[
        Annotated[float, Meta(gt=0, lt=1)] | None,
        _text("A sequence with any token of prox / mu below this leaves the loss; off when absent."),
    ] = None
    max_token_staleness: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        _text("Tokens of a larger staleness leave the loss, also where staleness.overdue = 'keep'; off when absent."),
    ] = None
    normalize: Annotated[bool, _text("Divide weights by their mean over the tokens that the update keeps (self-normalised importance sampling).")] = False


class KlConfig(Section, frozen=True):
    """A penalty of KL(pi || ref) towards a reference policy, a frozen copy of a model (Schulman 2020)."""

    coefficient: Annotated[float, _text("Weight of the penalty, the first one where `target` is set; 0: no penalty, and no reference is loaded.", ge=0)] = 0.0
    place: Annotated[
        Literal["loss", "reward"],
        _text("loss: added to each token's loss; reward: its sum over the trajectory is subtracted before advantages."),
    ] = "loss"
    estimator: Annotated[
        Literal["k1", "k2", "k3"] | None,
        _text("With d = log pi - log ref: d, d^2 / 2, or exp(-d) - 1 + d; absent: the one with the gradient of KL(pi || ref), k2 in the loss, k1 in the reward."),
    ] = None
    target: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        _text("Nats per token that the coefficient is steered to (arXiv:1909.08593); absent: it stays."),
    ] = None
    horizon: Annotated[int, _text("Steps far from the target that change the coefficient by about 20 %.", ge=1)] = 10
    reference: Annotated[str | None, _text("Folder of the reference policy, with the policy's tokenizer; default model.path.")] = None


class OverlongConfig(Section, frozen=True):
    """What becomes of completions that reach, or come close to, sampling.max_completion_tokens (DAPO, arXiv:2503.14476)."""

    penalty: Annotated[float, _text("Soft penalty: taken off the reward of a completion of full length, less in proportion within the buffer before it; 0: none.", ge=0)] = 0.0
    buffer_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _text("Tokens before sampling.max_completion_tokens over which the penalty rises; default: a fifth of it."),
    ] = None
    truncated: Annotated[
        Literal["keep", "mask", "exclude"],
        _text("Truncated completions: train (keep), leave the loss but count in their group's statistics (mask), or leave both (exclude)."),
    ] = "keep"


class AlgorithmConfig(Section, frozen=True):
    """What is optimised: advantage, loss, correction and reduction, combined freely."""

    advantage: Annotated[Advantage, _text("Advantage estimator.")] = GrpoAdvantage()
    loss: Annotated[Loss, _text("Per-token loss.")] = DecoupledPpoLoss()
    correction: Annotated[CorrectionConfig, _text("Off-policy correction.")] = CorrectionConfig()
    proximal: Annotated[
        Literal["recompute", "loglinear", "behavior", "current"],
        _text("Proximal policy: recompute: the policy at the start of the step, by a forward pass where it makes several updates; loglinear: between behavior and current policy by staleness, no pass (A-3PO, arXiv:2512.06547); behavior: mu, so that weights are 1; current: pi without gradient."),
    ] = "recompute"
    entropy_coefficient: Annotated[float, _text("Entropy bonus: each token's loss is lowered by this times its entropy.", ge=0)] = 0.0
    kl: Annotated[KlConfig, _text("KL penalty towards a reference policy.")] = KlConfig()
    overlong: Annotated[OverlongConfig, _text("Completions that are too long.")] = OverlongConfig()
    reduction: Annotated[
        Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"],
        _text("How per-token losses become one number; denominators are global over micro-batches and ranks."),
    ] = "token_mean"
    denominator: Annotated[
        Literal["all", "kept"],
        _text("Tokens and sequences that a reduction counts: all in the batch, so that rejection never raises the weight of the rest, or those that the correction kept."),
    ] = "all"
    constant_length: Annotated[Annotated[int, Meta(ge=1)] | None, _text("Divisor L of reduction='constant'; default sampling.max_completion_tokens.")] = None


class LearnerConfig(Section, frozen=True):
    """The learner: batch, optimizer, ranks."""

    ranks: Annotated[int, _text("Learner processes on this machine (FSDP2); torchrun's environment takes precedence.", ge=1)] = 1
    device: Annotated[Literal["auto", "cpu", "cuda"], _text("auto: cuda where there is one.")] = "auto"
    threads: Annotated[Annotated[int, Meta(ge=1)] | None, _text("CPU threads of each rank; default: cores shared evenly with local generators.")] = None
    batch_groups: Annotated[int, _text("Groups (problems) that one step consumes.", ge=1)] = 16
    micro_batch_tokens: Annotated[int, _text("Token budget of one forward/backward, prompts included.", ge=1)] = 8192
    logprob_chunk_tokens: Annotated[int, _text("Positions whose logits exist at once.", ge=1)] = 1024
    minibatches: Annotated[int, _text("Optimizer updates per epoch of a step.", ge=1)] = 1
    epochs: Annotated[int, _text("Passes over a batch in one step.", ge=1)] = 1
    lr: Annotated[float, _text("AdamW's peak learning rate.", gt=0)] = 1e-6
    betas: Annotated[tuple[float, float], _text("AdamW's betas.")] = (0.9, 0.95)
    eps: Annotated[float, _text("AdamW's epsilon.", gt=0)] = 1e-8
    weight_decay: Annotated[float, _text("AdamW's decoupled weight decay.", ge=0)] = 0.0
    warmup_steps: Annotated[int, _text("Steps of linear warm-up.", ge=0)] = 0
    decay: Annotated[Literal["constant", "linear", "cosine"], _text("Schedule after warm-up, down to lr * min_lr_ratio at run.steps.")] = "constant"
    min_lr_ratio: Annotated[float, _text("Final learning rate as a share of lr.", ge=0, le=1)] = 0.0
    max_grad_norm: Annotated[float | None, _text("Global gradient norm is clipped to this; absent: no clipping.")] = 1.0
    max_nonfinite_updates: Annotated[int, _text("This many non-finite updates in a row end the run.", ge=1)] = 5


class VllmEngine(Section, frozen=True, tag="vllm", tag_field="type"):
    """vLLM's AsyncLLM in the generator process."""

    dtype: Annotated[Literal["auto", "float32", "bfloat16"], _text("auto: float32 on CPU, the model's own type on GPU.")] = "auto"
    tensor_parallel: Annotated[int, _text("GPUs of one engine.", ge=1)] = 1
    max_model_len: Annotated[Annotated[int, Meta(ge=2)] | None, _text("Longest prompt + completion; default: what data, sampling and the model allow.")] = None
    kv_cache_bytes: Annotated[
        Annotated[int, Meta(ge=1 << 20)] | None,
        _text("KV cache of each worker on CPU; default: enough for all slots, at most a quarter of the free memory."),
    ] = None
    gpu_memory_utilization: Annotated[float, _text("Share of the GPU that the engine may take.", gt=0, le=1)] = 0.85
    block_size: Annotated[int, _text("Tokens per KV block; 32 lets short prompts be shared on CPU.", ge=8)] = 32
    enforce_eager: Annotated[bool | None, _text("Skip graph capture; absent: on CPU yes, on GPU no.")] = None
    prefix_caching: Annotated[bool, _text("Share the KV of equal prefixes (within one policy version).")] = True


class HfEngine(Section, frozen=True, tag="hf", tag_field="type"):
    """transformers on the generator's device, for machines without vLLM."""

    dtype: Annotated[Literal["float32", "bfloat16"], _text("Parameter type.")] = "float32"


class SimulatedEngine(Section, frozen=True, tag="simulated", tag_field="type"):
    """No model: lengths and latencies from distributions, for tests and sweeps."""

    median_tokens: Annotated[float, _text("Median completion length (lognormal).", gt=0)] = 64.0
    sigma: Annotated[float, _text("Sigma of the lognormal length; 0: all equal.", ge=0)] = 0.5
    tokens_per_s: Annotated[float, _text("Decoding rate of one running request.", gt=0)] = 1000.0
    load_s: Annotated[float, _text("Seconds that loading new weights takes.", ge=0)] = 0.0
    vocab_size: Annotated[int, _text("Token ids are 0..vocab_size-1; fewer where the model knows fewer.", ge=2)] = 100


EngineConfig = VllmEngine | HfEngine | SimulatedEngine


class GeneratorConfig(Section, frozen=True):
    """A generator process."""

    engine: Annotated[EngineConfig, _text("What samples tokens.")] = VllmEngine()
    count: Annotated[int, _text("Generators that `async-rl train` starts.", ge=0)] = 1
    slots: Annotated[int, _text("Members that the engine of one generator works on at once.", ge=1)] = 64
    prefetch: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        _text("Leases held beyond the slots, so that no slot waits for the network or a reward; default: a quarter of the slots."),
    ] = None
    threads: Annotated[Annotated[int, Meta(ge=1)] | None, _text("CPU threads of the engine; default: cores shared evenly with the learner.")] = None
    running_requests: Annotated[
        Literal["recompute", "keep", "finish"],
        _text("Requests running at an update: recompute their KV (exact), keep it (faster, mismatch), or let them finish first."),
    ] = "recompute"
    lease_timeout_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        _text("The learner gives a member to another generator too when its lease brought no result for this long, doubled for each earlier loss; a late result still counts. Default: half of run.stall_timeout_s."),
    ] = None
    max_restarts: Annotated[int, _text("Times that `async-rl train` restarts one generator.", ge=0)] = 3


class WeightsConfig(Section, frozen=True):
    """How new weights reach the generators."""

    backend: Annotated[Literal["auto", "gloo", "nccl"], _text("auto: nccl when learner and engine are on GPUs, else gloo.")] = "auto"
    wire_dtype: Annotated[Literal["float32", "bfloat16"] | None, _text("Type on the wire; default: model.dtype.")] = None
    bucket_bytes: Annotated[int, _text("Parameters are sent in buckets of about this size.", ge=1 << 16)] = 64 << 20
    deadline_s: Annotated[float, _text("A member that has not joined, received or loaded by then is evicted and the publication repeated. The file for one that comes later has four times as long to be written.", gt=0)] = 120.0
    port: Annotated[int, _text("Port of the rendezvous store; 0: any free one.", ge=0, le=65535)] = 0


class TransportConfig(Section, frozen=True):
    """The socket between learner and generators."""

    host: Annotated[str, _text("Address that the learner binds, and that generators connect to by default.")] = "127.0.0.1"
    port: Annotated[int, _text("Port; 0 takes any free one and writes it to <run.dir>/address.", ge=0, le=65535)] = 29400
    http_port: Annotated[int, _text("Port of /status, /metrics and snapshots; 0 takes any free one (see <run.dir>/address).", ge=0, le=65535)] = 0
    keys: Annotated[
        str | None,
        _text("Folder of key files (`async-rl keys FOLDER`): the learner reads learner.key, generators read generator.key, and nobody else is let in (docs/security.md)."),
    ] = None
    insecure: Annotated[bool, _text("Allow binding to an address other than loopback without keys.")] = False
    heartbeat_s: Annotated[float, _text("Seconds between heartbeats.", gt=0)] = 1.0
    heartbeat_timeout_s: Annotated[float, _text("A member silent for this long loses its leases.", gt=0)] = 15.0
    connect_timeout_s: Annotated[float, _text("A generator gives up when no learner answers for this long.", gt=0)] = 300.0
    max_message_bytes: Annotated[int, _text("Larger messages are refused and counted.", ge=1024)] = 64 << 20


class CheckpointConfig(Section, frozen=True):
    """What a killed learner goes on from (docs/checkpoints.md); written to <run.dir>/checkpoints."""

    every: Annotated[int, _text("Steps between checkpoints; 0: by time alone. The end of a run and SIGTERM save too, unless all are off.", ge=0)] = 20
    every_s: Annotated[Annotated[float, Meta(gt=0)] | None, _text("A checkpoint also after this many seconds without one; off when absent.")] = 1800.0
    keep_last: Annotated[int, _text("Newest checkpoints that stay; older ones go once a new one is complete.", ge=1)] = 2
    keep_every: Annotated[int, _text("Checkpoints at multiples of this step stay as well; 0: none.", ge=0)] = 0
    background: Annotated[bool, _text("Write while training goes on, from a copy of model and optimizer in host memory; false: training waits.")] = True
    deadline_s: Annotated[float, _text("A checkpoint that is not written by then ends the run with an error: its disk hangs. What was complete before stays.", gt=0)] = 1800.0
    accept_changed: Annotated[
        tuple[Literal["problems", "tickets"], ...],
        _text("Differences to the checkpoint that are accepted: other problems; other settings that tickets are bound to. Either drops tickets under way, counted."),
    ] = ()


class EvaluationConfig(Section, frozen=True):
    """Held-out evaluation, on the same generators, without stopping training."""

    every: Annotated[int, _text("Steps between evaluations; 0: none. The last version is always evaluated unless 0.", ge=0)] = 10
    samples: Annotated[int, _text("Completions per held-out problem.", ge=1)] = 1
    temperature: Annotated[float, _text("Sampling temperature; 0 is greedy.", ge=0)] = 1.0


class PlanConfig(Section, frozen=True):
    """What things take, and cost, in the simulation of `async-rl plan`; no other command reads it (docs/tuning.md)."""

    tokens_per_s: Annotated[Annotated[float, Meta(gt=0)] | None, _text("Decoding rate of one request that runs alone; default: that of the simulated engine.")] = None
    slowdown: Annotated[float, _text("Share by which each further running request of an engine stretches the time per token.", ge=0)] = 0.0
    median_tokens: Annotated[Annotated[float, Meta(gt=0)] | None, _text("Median completion length (lognormal); default: that of the simulated engine.")] = None
    sigma: Annotated[Annotated[float, Meta(ge=0)] | None, _text("Sigma of the lognormal length; default: that of the simulated engine.")] = None
    step_s: Annotated[float, _text("Seconds of a step whatever its size.", ge=0)] = 0.0
    learner_tokens_per_s: Annotated[Annotated[float, Meta(gt=0)] | None, _text("Completion tokens that one learner rank trains per second, beyond step_s.")] = None
    gather_s: Annotated[float, _text("Seconds for which a publication holds the learner.", ge=0)] = 0.0
    transfer_s: Annotated[float, _text("Seconds from there until engines begin to load.", ge=0)] = 0.0
    pause_s: Annotated[Annotated[float, Meta(ge=0)] | None, _text("Seconds for which an engine stands still to load; default: load_s of the simulated engine, else 0.")] = None
    score_s: Annotated[float, _text("Seconds from a completion's last token to its reward.", ge=0)] = 0.0
    failure_every_s: Annotated[Annotated[float, Meta(gt=0)] | None, _text("Mean seconds between failures of one generator; absent: none fails.")] = None
    restart_s: Annotated[float, _text("Seconds from a generator's failure until it has weights again.", ge=0)] = 60.0
    generator_price: Annotated[Annotated[float, Meta(ge=0)] | None, _text("Price of one generator for an hour; with learner_price the plan shows cost per trained token.")] = None
    learner_price: Annotated[Annotated[float, Meta(ge=0)] | None, _text("Price of one learner rank for an hour.")] = None
    devices: Annotated[Annotated[int, Meta(ge=2)] | None, _text("Devices to split between the two sides: a generator takes tensor_parallel of its engine, a learner rank one; default: as many as the settings use.")] = None
    members: Annotated[int, _text("Members that one simulation trains about: more take longer and vary less.", ge=100)] = 10000


class AlarmsConfig(Section, frozen=True):
    """When a metric raises an alarm: a counter and one line that says what it means and what to do (docs/alarms.md)."""

    patience: Annotated[int, _text("Steps in a row beyond a threshold that raise an alarm, and within it that end it.", ge=1)] = 3
    repeat_every: Annotated[int, _text("Steps before an alarm that stands says so again.", ge=1)] = 20
    stop: Annotated[
        tuple[
            Literal["effective_sample_size", "mismatch", "all_rejected", "overdue", "repeated_completions", "equal_rewards", "entropy_collapse", "failures"],
            ...,
        ],
        _text("Alarms that end the run with an error."),
    ] = ()
    min_effective_sample_size: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, _text("Alarm effective_sample_size below this share, uncorrected.")] = 0.3
    max_mismatch: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        _text("Alarm mismatch from this mean |engine - learner| logprob at staleness 0, nats; default: 1e-3 where both compute in float32, else 0.05."),
    ] = None
    max_masked_share: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, _text("Alarm all_rejected from this share of tokens that the correction removes.")] = 0.95
    max_overdue_share: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, _text("Alarm overdue from this share of sampled tokens that are masked for their age.")] = 0.5
    max_repeated_nats: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        _text("Alarm repeated_completions from copies within a group of a probability of exp(-this) or less."),
    ] = 30.0
    max_equal_rewards_share: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, _text("Alarm equal_rewards from this share of groups without signal.")] = 1.0
    min_entropy: Annotated[Annotated[float, Meta(gt=0)] | None, _text("Alarm entropy_collapse below this mean entropy, nats per token.")] = 0.005
    max_failed_share: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, _text("Alarm failures from this share of trajectories without a usable reward.")] = 0.5


class MetricsConfig(Section, frozen=True):
    """Where metrics go; metrics.jsonl is always written."""

    console: Annotated[Literal["auto", "live", "plain", "off"], _text("auto: live on a terminal, plain lines elsewhere.")] = "auto"
    wandb: Annotated[Literal["off", "offline", "online"], _text("Weights & Biases sink.")] = "off"
    wandb_project: Annotated[str, _text("W&B project.")] = "async_rl"
    tensorboard: Annotated[bool, _text("Write TensorBoard events to <run.dir>/tensorboard.")] = False
    report: Annotated[bool, _text("At the end draw <run.dir>/report.png, and write what would be faster to <run.dir>/advice.txt.")] = True


class LocalLauncher(Section, frozen=True, tag="local", tag_field="type"):
    """All processes on this machine."""


class RayResources(Section, frozen=True):
    """What one process reserves of a Ray node."""

    cpus: Annotated[float, _text("CPUs; also the threads of the process, unless learner.threads or generator.threads is set.", gt=0)] = 1.0
    gpus: Annotated[float, _text("GPUs; with 0 the process sees none.", ge=0)] = 0.0
    custom: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[^=\s]+=[0-9]*\.?[0-9]+$")], ...],
        _text("Further resources, each NAME=AMOUNT: what nodes were started with, or a certain node, such as node:10.0.0.5=0.01."),
    ] = ()


class RayLauncher(Section, frozen=True, tag="ray", tag_field="type"):
    """Processes on a Ray cluster, in one placement group (docs/ray.md)."""

    address: Annotated[str | None, _text("HOST:PORT of the cluster, or auto; default: RAY_ADDRESS, else the cluster of this machine, else one that is started for the run.")] = None
    learner_resources: Annotated[RayResources, _text("The learner with all its ranks, on one node.")] = RayResources()
    generator_resources: Annotated[RayResources, _text("Each generator.")] = RayResources()
    strategy: Annotated[
        Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
        _text("PACK: on few nodes; SPREAD: on many; STRICT_PACK: on one; STRICT_SPREAD: each process on a node of its own."),
    ] = "PACK"
    placement_timeout_s: Annotated[float, _text("The run ends when the cluster has no room for all processes for this long.", gt=0)] = 300.0
    start_timeout_s: Annotated[float, _text("A process that no node has started by then counts as one that died; for a lost generator this is the time to find another node.", gt=0)] = 300.0
    runtime_env: Annotated[str | None, _text("JSON file with Ray's runtime_env for all processes, such as env_vars, pip or working_dir; default: the nodes' own environment, in the folder where the command was started.")] = None


Launcher = LocalLauncher | RayLauncher


class Config(Section, frozen=True, kw_only=True):
    """All settings of a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig = DataConfig()
    environment: Environment
    rewards: RewardConfig = RewardConfig()
    sampling: SamplingConfig = SamplingConfig()
    staleness: StalenessConfig = StalenessConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    weights: WeightsConfig = WeightsConfig()
    transport: TransportConfig = TransportConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    metrics: MetricsConfig = MetricsConfig()
    launcher: Annotated[Launcher, _text("Where `async-rl train` starts learner and generators.")] = LocalLauncher()
    plan: PlanConfig = PlanConfig()
