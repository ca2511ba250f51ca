"""What the tests of environments share: data files, settings that name them, and tokenizers with their traps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from async_rl.config import Config, build_config

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
CHARACTERS = "0123456789+-*/=?.,:;()[]{}'\"$#\\ \n\u2028\u0085abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def character_tokenizer(
    template: str | None = None, single: str = "$A", characters: str = CHARACTERS
) -> PreTrainedTokenizerFast:
    """One token per character; `single` says where the tokenizer itself adds <bos> and <eos>, as '<bos> $A'."""
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = [(token, vocabulary[token]) for token in (BOS, EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS)
    made.chat_template = template
    return made


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows, one object a line, and return the path."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def make_config(file: Path | None, *overrides: str, environment: dict[str, Any] | None = None) -> Config:
    """Settings for a file of problems, nothing held out, one group a batch; `overrides` change that."""
    base: dict[str, Any] = {
        "model": {"path": "no-such-model"},
        "environment": environment or {"type": "exact_match"},
        "data": {"eval_problems": 0} | ({"path": str(file)} if file else {}),
        "evaluation": {"every": 0},
        "learner": {"batch_groups": 1},
    }
    return build_config(base, overrides)
