"""A worker of the time_to_reward suite: TRL's GRPOTrainer or the plain loop, on the problems and rewards of a preset.

After each step it tells how long its evaluations took so far, and the held-out accuracy where it was due: who asked
keeps the clock. TRL runs in the environment of `make peers`; it samples with transformers, as it does by default.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch

from async_rl.config import Config, load_config
from async_rl.envs.tokenize import completion_text
from benchmarks.plain_loop import PlainLoop
from benchmarks.workers import Answers


class Progress:
    """Evaluates when it is due and says so."""

    def __init__(self, answers: Answers, loop: PlainLoop, every: int) -> None:
        self.answers, self.loop, self.every, self.spent_s = answers, loop, every, 0.0

    def after(self, step: int, last: int) -> None:
        accuracy, began = None, time.perf_counter()
        if step % self.every == 0 or step == last:
            accuracy = self.loop.evaluate()
            self.spent_s += time.perf_counter() - began
        self.answers.say(step=step, evaluating_s=self.spent_s, accuracy=accuracy)


def run_plain(config: Config, progress: Progress) -> None:
    """The 60-line loop."""
    for step in range(config.run.steps + 1):
        if step:
            progress.loop.step()
        progress.after(step, config.run.steps)


def run_trl(config: Config, progress: Progress, model: Any, each: int) -> None:
    """GRPOTrainer with its defaults, but for what the preset sets: problems, batch, rates, optimizer, lengths."""
    from transformers import TrainerCallback

    class Tell(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            progress.after(0, config.run.steps)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            progress.after(state.global_step, config.run.steps)

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(config, progress.loop, model, each, folder)
        trainer.add_callback(Tell())
        trainer.train()


def make_trainer(config: Config, loop: PlainLoop, model: Any, each: int, folder: str) -> Any:
    from datasets import Dataset
    from torch.optim.lr_scheduler import LambdaLR
    from trl import GRPOConfig, GRPOTrainer

    from async_rl.learner.optim import learning_rate

    learner, sampling, steps = config.learner, config.sampling, config.run.steps
    problems = [p for p in (loop.source.draw() for _ in range(steps * learner.batch_groups)) if p is not None]
    for problem in problems[: learner.batch_groups]:
        assert loop.tokenizer.encode(problem.prompt) == problem.prompt_ids.tolist(), "TRL would see another prompt"

    def reward(completion_ids: list[list[int]], place: list[int], **_: Any) -> list[float]:
        texts = [completion_text(loop.tokenizer, torch.tensor(ids).numpy()) for ids in completion_ids]
        return [loop.score(problems[index], text) for index, text in zip(place, texts, strict=True)]

    arguments = GRPOConfig(
        output_dir=folder,
        seed=config.run.seed,
        per_device_train_batch_size=each,
        gradient_accumulation_steps=learner.batch_groups * sampling.group_size // each,
        num_generations=sampling.group_size,
        max_completion_length=sampling.max_completion_tokens,
        temperature=sampling.temperature,
        max_steps=steps,
        learning_rate=learner.lr,
        adam_beta1=learner.betas[0],
        adam_beta2=learner.betas[1],
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm or 0.0,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )

    class Scheduled(GRPOTrainer):
        """With the preset's schedule."""

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            def share(done: int) -> float:
                return learning_rate(learner, done + 1, steps) / learner.lr

            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, share)
            return self.lr_scheduler

    return Scheduled(
        model=model,
        processing_class=loop.tokenizer,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [p.prompt for p in problems], "place": [*range(len(problems))]}),
    )


def work() -> None:
    answers = Answers()
    settings = answers.settings
    config = load_config(settings["config"], settings["overrides"])
    torch.manual_seed(config.run.seed)
    loop = PlainLoop(config)
    progress = Progress(answers, loop, config.evaluation.every)
    if settings["loop"] == "trl":
        run_trl(config, progress, loop.model, settings["completions_each"])
    else:
        run_plain(config, progress)


if __name__ == "__main__":
    work()
