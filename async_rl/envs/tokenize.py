"""From prompts to token ids and from token ids to text: one function each way, used wherever either is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from async_rl.config.schema import DataConfig
from async_rl.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[dict[str, Any]]
"""Text, or messages {role, content}."""


class Rendered(NamedTuple):
    """A prompt as the policy sees it."""

    text: str
    ids: np.ndarray
    """int32 [P]"""


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a model folder's tokenizer.

    With a tokenizer.json this imports no torch (1 s; AutoTokenizer takes 4 s and imports it).
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"model.path: no folder {str(folder)!r}; it must hold a Hugging Face model and its tokenizer")
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        loader: Any = PreTrainedTokenizerFast
    else:
        from transformers import AutoTokenizer

        loader = AutoTokenizer
    try:
        return cast("PreTrainedTokenizerBase", loader.from_pretrained(folder, local_files_only=True))
    except Exception as error:  # the tokenizers library raises nothing narrower for a file that it cannot read
        raise InputError(f"model.path = {str(folder)!r}: its tokenizer cannot be loaded: {error}") from error


def uses_chat_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> bool:
    """Say whether prompts are rendered with the chat template; InputError for settings that contradict it."""
    has_template = bool(tokenizer.chat_template)
    if data.chat_template == "always" and not has_template:
        raise InputError("data.chat_template = 'always', but the tokenizer has no chat template; set 'auto' or 'never'")
    uses = has_template and data.chat_template != "never"
    if data.system_prompt is not None and not uses:
        raise InputError(
            "data.system_prompt has no effect: prompts are not rendered with a chat template "
            f"(data.chat_template = {data.chat_template!r}, tokenizer has {'one' if has_template else 'none'}); "
            "remove it"
        )
    return uses


def render_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, data: DataConfig) -> Rendered:
    """Render a prompt to text and tokens, the generation prompt included and at most one BOS token in front.

    Length checks and generation both use this result, so that they cannot disagree.
    """
    if uses_chat_template(tokenizer, data):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if data.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise InputError(
                    "the prompt starts with a system message of its own, and data.system_prompt is set; remove one"
                )
            messages.insert(0, {"role": "system", "content": data.system_prompt})
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        # Templates write BOS themselves.
        return Rendered(text, _encode(tokenizer, text, add_special_tokens=False))
    if not isinstance(prompt, str):
        raise InputError(
            "the prompt is a list of messages, which needs a chat template; give text, or a tokenizer with one"
        )
    starts_with_bos = bool(tokenizer.bos_token) and prompt.startswith(str(tokenizer.bos_token))
    ids = _encode(tokenizer, prompt, add_special_tokens=not starts_with_bos)
    # Some tokenizers close every text with EOS; a prompt is to be continued.
    if len(ids) and ids[-1] == tokenizer.eos_token_id and not prompt.endswith(str(tokenizer.eos_token)):
        ids = ids[:-1]
    return Rendered(prompt, ids)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> np.ndarray:
    try:
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except Exception as error:  # the tokenizers library raises nothing narrower for a character that it does not know
        raise InputError(f"the tokenizer cannot encode {text[:60]!r}: {error}") from error
    return np.asarray(ids, dtype=np.int32)


def stop_ids(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> tuple[int, ...]:
    """Return the token of each stop text; InputError for a text that is not exactly one token."""
    ids = []
    for text in stop:
        tokens = _encode(tokenizer, text, add_special_tokens=False).tolist()
        if len(tokens) != 1 or tokens[0] == tokenizer.unk_token_id:
            raise InputError(
                f"sampling.stop: {text!r} is {tokenizer.convert_ids_to_tokens(tokens)}, {len(tokens)} tokens of this "
                "tokenizer; each stop text must be exactly one known token"
            )
        ids.append(int(tokens[0]))
    return tuple(ids)


def completion_text(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> str:
    """Decode a completion for scoring: special tokens left out, white space as sampled."""
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))
