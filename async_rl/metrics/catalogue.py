"""Every metric, once: key, kind, unit, meaning, and what to do about it.

A new metric is one new row here and the call that records it. `<reason>` in a key stands for one lower-case word, so
that counters by reason need one row together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

Kind = Literal["mean", "sum", "max", "min", "last", "histogram"]


@dataclass(frozen=True)
class Row:
    """One metric. A histogram appears in the files as key/p10, key/p50 and key/p90."""

    key: str
    kind: Kind
    unit: str
    meaning: str
    advice: str = ""
    """What to do when the value is not as wished."""


# fmt: off
_RUN = (
    Row("step", "last", "steps", "Steps trained, counted from 1."),
    Row("policy_version", "last", "version", "Version that the step made; equals the step."),
)

_REWARD = (
    Row("reward/mean", "mean", "reward",
        "Mean reward of the batch's trajectories, failed ones left out.",
        "Flat from the start: see group/zero_variance_share, then the reward function. Falling: lower learner.lr."),
    Row("reward/sampled_mean", "mean", "reward",
        "Mean reward of all results to train on that came in during the step, later refilled groups included.",
        "Far above reward/mean with sampling.max_refills: most problems are solved already; add harder ones."),
    Row("reward/baseline_mean", "mean", "reward",
        "Mean reward of the batch's greedy completions, which algorithm.advantage.type = 'remax' subtracts.",
        "Far above reward/mean: the policy at sampling.temperature is worse than its most likely tokens; lower it."),
    Row("reward/overlong_penalty", "mean", "reward",
        "Mean of what the overlong penalty took off rewards; reward/mean is before it.",
        "Growing: completions run to their limit; see completion/length."),
    Row("reward/failed_share", "mean", "share",
        "Trajectories of the batch without a usable sample or reward.",
        "Above a few percent: read the first error on the console; raise rewards.timeout_s or rewards.workers."),
    Row("group/zero_variance_share", "mean", "share",
        "Groups whose members all got the same reward: no gradient.",
        "Near 1: too easy or too hard; mix difficulties, raise sampling.group_size or sampling.max_refills."),
    Row("group/identical_share", "mean", "share",
        "Groups whose completions are all the same.",
        "Near 1 with a low loss/entropy: the policy is sure; otherwise see group/repeated_nats."),
    Row("group/repeated_nats", "max", "nats",
        "Largest -log probability that independent samples would repeat each other as much as those of one group.",
        "Above 30: members share a seed; alarm repeated_completions."),
    Row("group/trained", "sum", "groups",
        "Groups in the batch.",
        "Equals learner.batch_groups, except at the end of the data."),
    Row("completion/length_mean", "mean", "tokens",
        "Mean completion length of the batch.",
        "Growing without reward: set algorithm.reduction; the default does not favour long completions."),
    Row("completion/length_max", "max", "tokens", "Longest completion of the batch."),
    Row("completion/length", "histogram", "tokens",
        "Completion lengths of the batch.",
        "A p90 far above p50 is a heavy tail: prefer larger batches of smaller groups, or a higher max_staleness."),
    Row("completion/truncated_share", "mean", "share",
        "Completions that hit sampling.max_completion_tokens.",
        "Above 0.1: raise sampling.max_completion_tokens, or reward brevity."),
    Row("completion/left_out_share", "mean", "share",
        "Scored completions that are not in the loss because they were truncated (algorithm.overlong.truncated).",
        "See completion/truncated_share."),
    Row("completion/sample_s", "mean", "s", "Mean time to sample one completion."),
    Row("reward/score_s", "mean", "s",
        "Mean time to score one completion.",
        "Close to rewards.timeout_s: raise rewards.workers or make the reward cheaper."),
)

_EVALUATION = (
    Row("eval/accuracy", "last", "share",
        "Mean reward on held-out problems.",
        "Far below reward/mean: overfitting; add data."),
    Row("eval/stderr", "last", "share",
        "Standard error of eval/accuracy over problems.",
        "Too wide to see a change: raise data.eval_problems or evaluation.samples."),
    Row("eval/num_problems", "last", "problems",
        "Held-out problems that were scored.",
        "Below data.eval_problems: some failed."),
    Row("eval/policy_version_min", "last", "version", "Oldest version that sampled in this evaluation."),
    Row("eval/policy_version_max", "last", "version",
        "Newest version that sampled in this evaluation.",
        "Differs from the minimum: an update arrived during the evaluation, which is mixed by that much."),
    Row("eval/failed_share", "last", "share",
        "Held-out completions without a usable sample or reward.",
        "See reward/failed_share."),
    Row("eval/length_mean", "last", "tokens", "Mean length of held-out completions."),
    Row("time/eval_s", "last", "s",
        "From the start of an evaluation to its last result.",
        "Long: fewer data.eval_problems."),
)

_STALENESS = (
    Row("staleness/mean", "mean", "steps",
        "Mean staleness of the tokens that enter the loss.",
        "Near the bound while the learner waits: raise staleness.max_staleness; the same near 0 with idle generators."),
    Row("staleness/max", "max", "steps",
        "Largest staleness of a token that enters the loss.",
        "Never above staleness.max_staleness unless staleness.overdue = 'keep'."),
    Row("staleness/tokens", "histogram", "steps", "Staleness of the tokens that enter the loss."),
    Row("staleness/overdue_token_share", "mean", "share",
        "Sampled tokens older than the bound (masked, or kept if so configured).",
        "Above 0.05: raise staleness.max_staleness, shorten completions, or use staleness.overdue = 'wait'."),
    Row("staleness/overdue_token_share_<quarter>", "mean", "share",
        "The same by completion length: quarter q1 holds the shortest completions of the batch, q4 the longest.",
        "High in q4 only: long completions lose their beginnings; raise staleness.max_staleness."),
)

_THROUGHPUT = (
    Row("throughput/generated_tokens_per_s", "mean", "tokens/s",
        "Completion tokens that all generators sampled.",
        "Below throughput/trained_tokens_per_s for long: the buffer empties; add generators."),
    Row("throughput/trained_tokens_per_s", "mean", "tokens/s", "Completion tokens of the trained batches."),
    Row("throughput/baseline_tokens_per_s", "mean", "tokens/s",
        "Tokens of greedy completions (algorithm.advantage.type = 'remax'), part of throughput/generated_tokens_per_s.",
        "They never train: one in sampling.group_size + 1 completions; larger groups make their share smaller."),
    Row("throughput/dropped_tokens_per_s", "mean", "tokens/s",
        "Sampled tokens that came for nothing (late, duplicate) or whose ticket was dropped (refilled groups too).",
        "See ledger/dropped_<reason> and staleness/overdue_token_share."),
    Row("generator/count", "last", "generators",
        "Generators that are registered.",
        "Fewer than started: read their logs."),
    Row("generator/slots", "last", "members", "Slots of all registered generators."),
    Row("generator/idle_share", "mean", "share",
        "Slot-seconds without work.",
        "High: the learner is the bottleneck; fewer generators, a higher max_staleness, or a faster learner."),
    Row("generator/round_trip_s", "mean", "s",
        "From sending a finished member to its acknowledgement, with which new work comes.",
        "A good part of completion/sample_s: raise generator.prefetch; or a core of either end is busy."),
    Row("learner/wait_share", "mean", "share",
        "Share of the step in which the learner waited for its batch.",
        "High: generation is the bottleneck; more generators or slots, or a higher max_staleness."),
)

_TIME = (
    Row("time/step_s", "last", "s", "From the end of the last step to the end of this one."),
    Row("time/wait_for_batch_s", "last", "s", "Waiting for a batch.", "See learner/wait_share."),
    Row("time/train_s", "last", "s",
        "Forward, backward and optimizer.",
        "Long: raise learner.micro_batch_tokens if memory allows."),
    Row("time/publish_s", "last", "s", "The learner held by a publication.", "Long: raise staleness.publish_every."),
    Row("time/gather_s", "last", "s", "Gathering shards into the send buffers."),
    Row("time/wire_s", "last", "s",
        "From the first byte sent to the last member's acknowledgement.",
        "Long: weights.wire_dtype = 'bfloat16'."),
    Row("time/load_s", "max", "s", "Slowest engine's loading of new weights."),
    Row("time/pause_s", "max", "s",
        "Longest time that an engine stood still for an update.",
        "Long: generator.running_requests = 'keep', or raise staleness.publish_every."),
    Row("time/checkpoint_s", "sum", "s",
        "The learner held by checkpoints since the line before: waiting for the last one, copying, and all of it "
        "where checkpoint.background is false.",
        "Long: raise checkpoint.every, or write to a faster disk."),
    Row("checkpoint/write_s", "last", "s", "Writing the last checkpoint that was completed."),
    Row("checkpoint/bytes", "last", "bytes", "Size of the last checkpoint that was completed."),
    Row("checkpoint/step", "last", "step", "Step of the last checkpoint that was completed."),
    Row("checkpoint/failed", "sum", "checkpoints",
        "Checkpoints that could not be written; training goes on, and a crash goes back to the last complete one.",
        "Above 0: the first error is on the console; a full disk, most often."),
    Row("time/publication_s", "last", "s", "From the start of a publication until every generator sampled with it."),
)

_CORRECTION = (
    Row("correction/effective_sample_size", "mean", "share",
        "(sum w)^2 / (n sum w^2) of the behavior weights; 1 is on-policy.",
        "Below 0.5: data too old or engine off; lower staleness.max_staleness or learner.lr, see mismatch/*."),
    Row("correction/truncated_share", "mean", "share",
        "Tokens whose behavior weight was truncated at the cap.",
        "High: as above."),
    Row("correction/masked_share", "mean", "share",
        "Tokens that the correction, or a loss with a mask of its own, removed.",
        "High: as above."),
    Row("correction/stale_share", "mean", "share",
        "Tokens that left the loss because they are older than algorithm.correction.max_token_staleness.",
        "High: generation is far ahead; lower staleness.max_staleness, or mask less."),
    Row("correction/ratio_mean", "mean", "ratio",
        "Mean behavior weight before truncation; near 1.",
        "Far from 1: see mismatch/*."),
    Row("correction/ratio_max", "max", "ratio", "Largest behavior weight before truncation."),
    Row("correction/kl_behavior_current_k1", "mean", "nats",
        "KL(behavior || current), estimator -log ratio.",
        "Growing: lower learner.lr."),
    Row("correction/kl_behavior_current_k3", "mean", "nats",
        "KL(behavior || current), estimator ratio - 1 - log ratio; never negative.",
        "Growing: lower learner.lr."),
    Row("ratio/effective_sample_size", "mean", "share",
        "(sum r)^2 / (n sum r^2) of the token ratios r = policy at the start of the step / behavior, uncorrected.",
        "Below 0.5: see profile/* for the staleness that does it; lower staleness.max_staleness or learner.lr."),
    Row("ratio/far_share", "mean", "share",
        "Tokens whose ratio r lies outside [1/2, 2].",
        "Above 0.01: as above; algorithm.correction bounds their weight."),
    Row("ratio/p01", "last", "ratio", "1 % of the token ratios r are at or below this; to half a percent."),
    Row("ratio/p50", "last", "ratio", "Median of the token ratios r.", "Far from 1: the engine has other numerics."),
    Row("ratio/p99", "last", "ratio", "99 % of the token ratios r are at or below this."),
    Row("ratio/kl_sequence_k1", "mean", "nats",
        "KL(behavior || start of the step) of whole sequences, by minus the sum of log r.",
        "Above 1: sequence weights (algorithm.correction.level = 'sequence') have no effective samples left."),
    Row("ratio/kl_sequence_k3", "mean", "nats",
        "The same by R - 1 - log R with R the product of r, clamped to e^20; never negative.",
        "Far above ratio/kl_sequence_k1: a few sequences rule."),
    Row("profile/tokens_<staleness>", "sum", "tokens",
        "Tokens of one staleness that the rows below are over; `older` holds those beyond the last row."),
    Row("profile/effective_sample_size_<staleness>", "mean", "share",
        "ratio/effective_sample_size of the tokens of one staleness.",
        "Falls with staleness: the first one below 0.5 is where data starts to hurt; bound staleness below it."),
    Row("profile/log_ratio_abs_<staleness>", "mean", "nats",
        "Mean |log r| of the tokens of one staleness; at 0 the mismatch of engine and learner.",
        "At 0 as large as at 1: numerics, not age, is the problem."),
    Row("profile/k1_<staleness>", "mean", "nats", "KL(behavior || start of the step) per token, by -log r."),
    Row("profile/k3_<staleness>", "mean", "nats",
        "The same by r - 1 - log r; never negative.",
        "Grows faster than staleness itself: lower learner.lr."),
    Row("profile/far_share_<staleness>", "mean", "share", "ratio/far_share of the tokens of one staleness."),
    Row("mismatch/logprob_abs_mean", "mean", "nats",
        "|engine - learner| logprob over tokens of staleness 0.",
        "Above 1e-3 (float32) or 2e-2 (bfloat16): the engine has other weights or numerics; do not trust the run."),
    Row("mismatch/logprob_abs_max", "max", "nats",
        "Largest |engine - learner| logprob over tokens of staleness 0.",
        "A jump is an alarm."),
    Row("mismatch/tokens", "sum", "tokens", "Tokens of staleness 0 that the two lines above are over."),
)

_OPTIMISATION = (
    Row("loss/policy", "mean", "nats", "The policy loss, without entropy bonus and KL penalty; its size says little."),
    Row("loss/clip_share_low", "mean", "share",
        "Tokens at the lower clip.",
        "High: lower learner.lr or raise clip_low."),
    Row("loss/clip_share_high", "mean", "share",
        "Tokens at the upper clip.",
        "High: lower learner.lr or raise clip_high."),
    Row("loss/entropy", "mean", "nats",
        "Mean entropy of the current policy per token.",
        "Near 0 early: the policy collapsed; lower learner.lr."),
    Row("loss/tokens", "sum", "tokens", "Tokens that entered the loss."),
    Row("optimizer/lr", "last", "1", "Learning rate of the step."),
    Row("optimizer/grad_norm", "mean", "1",
        "Global gradient norm before clipping.",
        "Spikes: lower learner.lr or learner.max_grad_norm."),
    Row("optimizer/updates", "sum", "updates", "Optimizer updates of the step."),
    Row("optimizer/skipped_updates", "sum", "updates",
        "Updates skipped because the gradient was not finite.",
        "Above 0: lower learner.lr; see learner.max_nonfinite_updates."),
)

_KL = (
    Row("kl/reference_k1", "mean", "nats",
        "KL(pi || reference) per token, estimator log pi - log ref; unbiased, may be negative.",
        "See kl/reference_k3."),
    Row("kl/reference_k3", "mean", "nats",
        "KL(pi || reference) per token, estimator exp(-d) - 1 + d with d = log pi - log ref; never negative.",
        "Grows as the policy leaves its reference; faster than the reward: raise algorithm.kl.coefficient."),
    Row("kl/coefficient", "last", "1",
        "Weight of the KL penalty in this step.",
        "At its extremes with algorithm.kl.target set: the target cannot be held; change it or algorithm.kl.horizon."),
    Row("kl/reward_penalty", "mean", "reward",
        "What the KL penalty subtracts from the reward of a trajectory, with algorithm.kl.place = 'reward'.",
        "Of the size of reward/mean: the penalty rules; lower algorithm.kl.coefficient."),
)

_LEDGER = (
    Row("ledger/issued", "last", "tickets", "Tickets issued: leased + buffered + in_batch + trained + dropped."),
    Row("ledger/leased", "last", "tickets", "Tickets that generators work on."),
    Row("ledger/buffered", "last", "tickets", "Complete groups that wait for a batch."),
    Row("ledger/in_batch", "last", "tickets", "Groups of the batch under way."),
    Row("ledger/trained", "last", "tickets", "Tickets trained so far."),
    Row("ledger/dropped", "last", "tickets", "Tickets dropped so far.", "See the reasons below."),
    Row("ledger/dropped_<reason>", "last", "tickets",
        "Tickets dropped so far, by reason: zero_variance (refilled, sampling.max_refills), failed_members, "
        "failed_baseline (algorithm.advantage.type = 'remax'), tail.",
        "The reason names the cause."),
    Row("ledger/event_<event>", "last", "events",
        "What happened to leases and results so far: failed_attempts, lost_leases, expired_leases, late, duplicate, "
        "from_lost_future.",
        "lost_leases or late growing: generators die or are cut off; see the console and async-rl train's logs. "
        "expired_leases growing: an engine hangs, or completions take longer than generator.lease_timeout_s."),
    Row("buffer/groups", "last", "groups",
        "Groups in the replay buffer.",
        "Always near 0: generation is the bottleneck."),
    Row("transport/refused_<reason>", "last", "messages",
        "Messages or connections refused so far, by reason.",
        "Above 0: a stranger or an old version talks to the port."),
    Row("membership/evicted", "last", "generators",
        "Generators evicted so far.",
        "Growing: raise transport.heartbeat_timeout_s or weights.deadline_s."),
    Row("data/dropped_<reason>", "last", "problems", "Problems of the dataset that are never posed, by reason."),
)

_ALARMS = (
    Row("alarm/<name>", "last", "steps",
        "Steps that an alarm has stood so far (docs/alarms.md); thresholds are in section alarms.",
        "Above 0: its line on the console says what it means and what to do."),
)

_MEMORY = (
    Row("memory/learner_rss_bytes", "max", "bytes",
        "Resident memory of the largest learner rank.",
        "Lower learner.micro_batch_tokens."),
    Row("memory/learner_gpu_peak_bytes", "max", "bytes",
        "Peak GPU memory of the largest learner rank.",
        "Lower learner.micro_batch_tokens."),
)
# fmt: on

CATALOGUE: tuple[Row, ...] = (
    *_RUN,
    *_REWARD,
    *_EVALUATION,
    *_STALENESS,
    *_THROUGHPUT,
    *_TIME,
    *_CORRECTION,
    *_OPTIMISATION,
    *_KL,
    *_LEDGER,
    *_ALARMS,
    *_MEMORY,
)


def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<\w+>", "[a-z0-9_]+", key))


@cache
def find_row(key: str) -> Row | None:
    """The row of a key: by its name, else by a placeholder; None when it is not catalogued."""
    exact = [row for row in CATALOGUE if row.key == key]
    return next((row for row in exact or CATALOGUE if _pattern(row.key).fullmatch(key)), None)
