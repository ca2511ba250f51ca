"""From prompts to tokens and back: one BOS, the template, stop texts, white space."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from async_rl.config.schema import DataConfig
from async_rl.envs.tokenize import completion_text, load_tokenizer, render_prompt, stop_ids, uses_chat_template
from async_rl.errors import InputError
from tests.envs.settings import BOS, CHARACTERS, EOS, TEMPLATE, character_tokenizer

PLAIN = character_tokenizer()
ADDS_BOS = f"{BOS} $A"
ADDS_BOTH = f"{BOS} $A {EOS}"


def render(prompt, template: str | None = None, single: str = "$A", **data) -> tuple[str, str]:
    """Text, and tokens joined."""
    tokenizer = character_tokenizer(template, single)
    text, ids = render_prompt(tokenizer, prompt, DataConfig(**data))
    assert ids.dtype == np.int32 and ids.ndim == 1
    return text, "".join(tokenizer.convert_ids_to_tokens(ids.tolist()))


# --- prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("single", ["$A", ADDS_BOS, ADDS_BOTH])
def test_a_template_that_writes_bos_is_not_doubled_by_the_tokenizer(single: str) -> None:
    text, tokens = render("hi", TEMPLATE, single)
    assert text == tokens == "<bos>[user]hi\n[assistant]"


@pytest.mark.parametrize(
    ("prompt", "single", "tokens"),
    [
        ("hi", "$A", "hi"),
        ("hi", ADDS_BOS, "<bos>hi"),
        ("<bos>hi", ADDS_BOS, "<bos>hi"),
        ("<bos>hi", "$A", "<bos>hi"),
        ("hi", ADDS_BOTH, "<bos>hi"),
        ("<bos>hi", ADDS_BOTH, "<bos>hi"),
        ("hi<eos>", "$A", "hi<eos>"),
    ],
)
def test_plain_prompts_have_the_tokenizers_bos_once_and_are_left_open(prompt: str, single: str, tokens: str) -> None:
    """An EOS that the tokenizer adds is taken away, one that the user wrote stays."""
    text, got = render(prompt, None, single)
    assert (text, got) == (prompt, tokens)


def test_messages_keep_their_roles_and_end_with_the_turn_of_the_policy() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    text, tokens = render(messages, TEMPLATE)
    assert text == tokens == "<bos>[user]a\n[assistant]b\n[user]c\n[assistant]"
    assert messages[0] == {"role": "user", "content": "a"}, "the file's rows are not changed"


def test_the_system_prompt_stands_first_and_only_once() -> None:
    text, _ = render("a", TEMPLATE, system_prompt="Be brief.")
    assert text == "<bos>[system]Be brief.\n[user]a\n[assistant]"
    with pytest.raises(InputError, match=r"a system message of its own, and data\.system_prompt is set; remove one"):
        render([{"role": "system", "content": "x"}, {"role": "user", "content": "a"}], TEMPLATE, system_prompt="y")


def test_never_means_the_text_alone() -> None:
    assert render("a", TEMPLATE, ADDS_BOS, chat_template="never") == ("a", "<bos>a")


@pytest.mark.parametrize(
    ("template", "data", "message"),
    [
        (None, {"chat_template": "always"}, "data.chat_template = 'always', but the tokenizer has no chat template"),
        (None, {"system_prompt": "x"}, "data.system_prompt has no effect"),
        (TEMPLATE, {"system_prompt": "x", "chat_template": "never"}, "data.system_prompt has no effect"),
    ],
)
def test_settings_that_contradict_the_tokenizer_are_refused(template: str | None, data: dict, message: str) -> None:
    with pytest.raises(InputError) as error:
        uses_chat_template(character_tokenizer(template), DataConfig(**data))
    assert str(error.value).startswith(message)


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(InputError, match="a list of messages, which needs a chat template"):
        render([{"role": "user", "content": "a"}])


# --- stop texts -------------------------------------------------------------------------------------


def test_stop_texts_are_single_tokens() -> None:
    assert stop_ids(PLAIN, ["\n", EOS]) == (PLAIN.convert_tokens_to_ids("\n"), PLAIN.eos_token_id)
    assert stop_ids(PLAIN, []) == ()


@pytest.mark.parametrize(
    ("text", "part"), [("\n\n", "2 tokens"), ("END", "['E', 'N', 'D'], 3 tokens"), ("", "0 tokens")]
)
def test_stop_texts_of_several_tokens_or_none_are_refused(text: str, part: str) -> None:
    with pytest.raises(InputError, match=r"each stop text must be exactly one known token") as error:
        stop_ids(PLAIN, ["\n", text])
    assert str(error.value).startswith(f"sampling.stop: {text!r} is ") and part in str(error.value)


def test_a_stop_text_that_the_tokenizer_does_not_know_is_refused() -> None:
    with pytest.raises(InputError, match="the tokenizer cannot encode '\u20ac'"):
        stop_ids(PLAIN, ["\u20ac"])
    with_unknown = PreTrainedTokenizerFast(tokenizer_object=_with_unknown(), unk_token="<unk>")
    with pytest.raises(InputError, match=r"'\u20ac' is \['<unk>'\], 1 tokens .* exactly one known token"):
        stop_ids(with_unknown, ["\u20ac"])


def _with_unknown():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))


# --- completions ------------------------------------------------------------------------------------


@given(st.text(alphabet=CHARACTERS, max_size=40))
def test_completions_are_scored_as_sampled_without_special_tokens(text: str) -> None:
    ids = [*PLAIN.encode(text), PLAIN.eos_token_id]
    assert completion_text(PLAIN, np.asarray(ids, dtype=np.int32)) == text


def test_spaces_before_punctuation_stay() -> None:
    """transformers' clean-up would make 'a , b' of a completion into 'a, b'."""
    text = "a , b . n't 's ?"
    assert completion_text(PLAIN, np.asarray(PLAIN.encode(text), dtype=np.int32)) == text


# --- loading ------------------------------------------------------------------------------------------


def test_a_saved_tokenizer_renders_the_same(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(TEMPLATE, ADDS_BOS)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for data in (DataConfig(system_prompt="s"), DataConfig(chat_template="never")):
        a, b = (render_prompt(t, "hi", data) for t in (tokenizer, loaded))
        assert (a.text, a.ids.tolist()) == (b.text, b.ids.tolist())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model\.path: no folder '.*nowhere'"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.slow
def test_loading_a_tokenizer_and_rendering_imports_no_torch(tmp_path: Path) -> None:
    """The coordinator may render in a process of its own; torch would cost it seconds and memory."""
    character_tokenizer(TEMPLATE).save_pretrained(tmp_path)
    code = (
        "import sys\n"
        "from async_rl.envs.tokenize import load_tokenizer, render_prompt\n"
        "from async_rl.config.schema import DataConfig\n"
        f"print(render_prompt(load_tokenizer({str(tmp_path)!r}), 'hi', DataConfig()).text, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "<bos>[user]hi\n[assistant] False\n"
