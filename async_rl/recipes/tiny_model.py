"""The quickstart's policy: a 0.3 M-parameter Qwen3 with a character tokenizer, trained briefly on sums.

It knows most sums but is unsure of them, and it has a bad habit: half of the sums that it was shown carry a second
equals sign ("12+34==46"). At temperature 1 it gets about two fifths of unseen sums right; what is left to
reinforcement learning is to drop the habit and to become sure of the right digits.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from async_rl.config.schema import ArithmeticEnvironment
from async_rl.config.threads import usable_cores
from async_rl.envs.arithmetic import pose

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "0123456789+-*="
IGNORED = -100
"""Label of tokens that are not learned: prompts and padding."""

MAX_OPERAND = 49
STEPS, BATCH, LR, WARMUP = 480, 128, 6e-3, 50
INIT_STD = 0.06
"""Three times the usual: a model this small learns sums twice as fast from it, and bears larger updates afterwards."""
HABIT, HABIT_SHARE = "=", 0.5
"""Put before the answer in this share of the training sums; the reward calls it wrong."""
UNSURE = 1.4
"""The finished policy samples at temperature 1 as the trained one does at this temperature."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; no torch is imported."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return the untrained model: 2 layers, 4 heads of 32, tied embeddings, float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=INIT_STD,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, sums: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, int64 [N, L], right padded; labels are the answer and the end token, elsewhere IGNORED."""
    import torch

    prompts = [tokenizer.encode(prompt) for prompt, _ in sums]
    answers = [[*tokenizer.encode(answer), tokenizer.eos_token_id] for _, answer in sums]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(sums), length), tokenizer.pad_token_id)
    labels = torch.full((len(sums), length), IGNORED)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def pose_sums(
    rng: random.Random, count: int, held_out: bool = False, habit_share: float = 0.0
) -> list[tuple[str, str]]:
    """Return (prompt, answer) of random sums, a share of the answers with the bad habit."""
    settings = ArithmeticEnvironment(kinds=("sum",), max_operand=MAX_OPERAND)
    posed = [pose(rng, "sum", settings, held_out) for _ in range(count)]
    return [(p.text, (HABIT if rng.random() < habit_share else "") + str(p.answer)) for p in posed if p is not None]


def pretrain(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, say: Callable[[str], None]) -> None:
    """Train on random training sums; the held-out ones stay unseen."""
    import torch

    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, (STEPS - step) / (STEPS - WARMUP))
    )
    for step in range(1, STEPS + 1):
        ids, labels = encode(tokenizer, pose_sums(rng, BATCH, habit_share=HABIT_SHARE))
        logits = model(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 120 == 0:
            say(f"tiny model: step {step} of {STEPS}, loss {loss.item():.2f} nats per token")
    # With tied embeddings the last norm alone scales the logits.
    model.model.norm.weight.data /= UNSURE


def answer_probabilities(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the probability of each answer at temperature 1, float32 [N]."""
    import torch

    targets = labels[:, 1:]
    with torch.no_grad():
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (logprobs * (targets != IGNORED)).sum(-1).exp()


def build(out_dir: Path | str, say: Callable[[str], None] = print) -> Path:
    """Build, train and save the policy as a Hugging Face folder, once; return the folder."""
    folder = Path(out_dir)
    if (folder / "config.json").is_file():
        return folder
    import torch

    torch.set_num_threads(usable_cores())
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    pretrain(model, tokenizer, say)
    with torch.no_grad():
        chance = answer_probabilities(model, *encode(tokenizer, pose_sums(random.Random(1), 512, held_out=True)))
    say(f"tiny model: {chance.mean():.0%} of unseen sums right at temperature 1, saved in {folder}")
    save_whole(folder, lambda part: (model.save_pretrained(part), tokenizer.save_pretrained(part)))
    return folder


def save_whole(folder: Path, save: Callable[[Path], object]) -> None:
    """Let `save` fill a new folder beside the target and rename it, so that half a model is never found."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save(part)
        os.chmod(part, 0o755)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
