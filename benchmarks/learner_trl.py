"""A worker of the learner suite: the same optimizer step by TRL's GRPOTrainer, in the environment of `make peers`.

Completions are given through `rollout_func`, and the time of the trainer's whole generation phase does not count. What
counts is rewards, advantages, padding, whatever logprob passes the trainer makes by itself, forward, backward, clipping
and the optimizer. Settings are its defaults (loss "dapo", AdamW fused, betas 0.9 and 0.999, group-scaled rewards), but
for the type, which is the other side's, and the two that the suite tries: completions of one forward, checkpointing.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.learner_data import Batch, load
from benchmarks.workers import Answers, Meter, Use, resident


class Given:
    """Stands in for sampling and for rewards; a prompt is the number of its group."""

    def __init__(self, batches: list[Batch]) -> None:
        self.groups = [group for batch in batches for group in batch]

    def members(self, prompts: list[str]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(group, member) of each prompt; the trainer repeats a prompt for every member of its group."""
        seen: dict[str, int] = {}
        found = []
        for prompt in prompts:
            group = self.groups[int(prompt)]
            found.append((group, group["members"][seen.get(prompt, 0)]))
            seen[prompt] = seen.get(prompt, 0) + 1
        return found

    def sample(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        pairs = self.members(prompts)
        return {
            "prompt_ids": [group["prompt_ids"] for group, _ in pairs],
            "completion_ids": [member["completion_ids"] for _, member in pairs],
            "logprobs": [member["behavior_logprobs"] for _, member in pairs],
        }

    def reward(self, prompts: list[str], **_: Any) -> list[float]:
        return [member["reward"] for _, member in self.members(prompts)]


class Timed(GRPOTrainer):
    """Knows what its generation phase took."""

    generation: Use | None = None

    def _generate(self, *arguments: Any) -> Any:
        wall, processor = time.perf_counter(), time.process_time()
        result = super()._generate(*arguments)
        self.generation = Use(time.perf_counter() - wall, time.process_time() - processor, 0)
        return result


class Turns(TrainerCallback):
    """Waits before each step until it is told to take it; answers with what it took."""

    def __init__(self, answers: Answers) -> None:
        self.answers, self.step, self.trainer = answers, 0, None
        self.use: Use | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        message = self.answers.next()
        assert message["batch"] == self.step, f"batches come in order: {message['batch']} is not {self.step}"
        self.meter = Meter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.use = self.meter.stop()
        self.step += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "grad_norm" not in logs:
            return
        assert self.use is not None and self.trainer is not None and self.trainer.generation is not None
        use = asdict(self.use)
        use["wall_s"] -= self.trainer.generation.wall_s
        use["processor_s"] -= self.trainer.generation.processor_s
        self.answers.say(**use, loss=float(logs["loss"]), grad_norm=float(logs["grad_norm"]))


def make_trainer(settings: dict[str, Any], shape: dict[str, Any], batches: list[Batch], folder: str) -> Timed:
    given, each = Given(batches), settings["completions_each"]
    total = shape["groups"] * shape["group_size"]
    arguments = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=each,
        gradient_accumulation_steps=total // each,
        num_generations=shape["group_size"],
        max_completion_length=shape["longest"],
        max_steps=len(batches),
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        bf16=settings["dtype"] == "bfloat16",
        gradient_checkpointing=settings["gradient_checkpointing"],
        model_init_kwargs={"dtype": "float32"},
        shuffle_dataset=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    return Timed(
        model=settings["model"],
        reward_funcs=given.reward,
        rollout_func=given.sample,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(given.groups))]}),
    )


def work() -> None:
    answers = Answers()
    shape, batches = load(answers.settings["completions"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(answers.settings, shape, batches, folder)
        turns = Turns(answers)
        turns.trainer = trainer
        trainer.add_callback(turns)
        answers.say(resident_bytes=resident())
        trainer.train()


if __name__ == "__main__":
    work()
