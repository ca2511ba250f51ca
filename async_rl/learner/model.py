"""The policy: a Hugging Face causal LM that scores completions, on one rank or sharded over several (FSDP2)."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from async_rl.config.schema import LearnerConfig, ModelConfig
from async_rl.errors import InputError
from async_rl.learner.batch import PreparedBatch
from async_rl.learner.layout import MicroBatch, packed_micro_batch, padded_micro_batch
from async_rl.learner.packing import Plan, Unit, make_units, plan_packed, plan_padded
from async_rl.learner.probe import choose_layout
from async_rl.learner.ranks import RankContext, sum_over_ranks
from async_rl.learner.scorer import CompletionScorer

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WEIGHT_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
)


class Policy:
    """The model that is trained, the same object on every rank; methods marked collective run on all ranks alike."""

    def __init__(self, scorer: CompletionScorer, source: Path, ctx: RankContext, dtype: str, packed: bool) -> None:
        self.scorer = scorer
        self.model = scorer.model
        self.source = source
        self.ctx = ctx
        self.dtype = dtype
        """model.dtype: the type of compute and of saved weights."""
        self.packed = packed
        """Whether micro-batches are packed with shared prompts; else padded, one sequence a row."""

    def plan(self, batch: PreparedBatch, chosen: Sequence[int], budget: int) -> Plan:
        """Micro-batches of at most `budget` input tokens for the chosen sequences, the same on every rank."""
        units = make_units(batch, chosen, budget, share_prompts=self.packed)
        return (plan_packed if self.packed else plan_padded)(units, budget, self.ctx.world)

    def micro_batch(self, batch: PreparedBatch, units: Sequence[Unit]) -> MicroBatch:
        """Tensors of one micro-batch on the policy's device."""
        return (packed_micro_batch if self.packed else padded_micro_batch)(batch, units, self.ctx.device)

    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of each token in the loss, float32 [max(T, 1)], with gradient. Collective."""
        logprobs, entropy = self.scorer(micro_batch, temperature)
        return logprobs, entropy

    def micro_batches(self, batch: PreparedBatch, chosen: Sequence[int], budget: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the chosen sequences; every rank gets the same number of them."""
        for row in self.plan(batch, chosen, budget):
            yield self.micro_batch(batch, row[self.ctx.rank])

    @torch.no_grad()
    def score(self, batch: PreparedBatch, chosen: Sequence[int], temperature: float, budget: int) -> Tensor:
        """Logprobs of the chosen sequences' tokens without gradient, float32 [T], 0 elsewhere, on every rank.

        Collective.
        """
        result = torch.zeros(batch.num_tokens, device=self.ctx.device)
        for micro_batch in self.micro_batches(batch, chosen, budget):
            logprobs, _ = self.logprobs(micro_batch, temperature)
            result[micro_batch.tokens] = logprobs[: len(micro_batch.tokens)]
        self._reshard()
        return sum_over_ranks(result)

    def parameters(self) -> list[nn.Parameter]:
        """Trainable parameters, float32, sharded where there are several ranks; tied ones once."""
        self._reshard()
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _reshard(self) -> None:
        """After a forward without backward the root's parameters are still gathered, and in the type of compute."""
        if isinstance(self.scorer, FSDPModule):
            self.scorer.reshard()

    def full_parameters(self, wire_dtype: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (name as in the checkpoint, whole tensor), tied ones once, in a fixed order. Collective.

        A tensor may be the parameter itself: copy what must outlive the next update.
        """
        self._reshard()
        for name, parameter in self.model.named_parameters():
            tensor = parameter.detach().to(DTYPES[wire_dtype])
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def save_pretrained(self, directory: str | Path) -> None:
        """Write a folder that `from_pretrained` loads, tokenizer included, from rank 0. Collective."""
        directory = Path(directory)
        weights = {
            name: tensor.cpu() if self.ctx.rank == 0 else None for name, tensor in self.full_parameters(self.dtype)
        }
        if self.ctx.rank != 0:
            return
        directory.mkdir(parents=True, exist_ok=True)
        for file in self.source.iterdir():
            if file.is_file() and not is_weight_file(file):
                shutil.copyfile(file, directory / file.name)
        self.model.save_pretrained(directory, state_dict=weights)
        # save_pretrained writes the type of the parameters in memory, which is always float32.
        settings = copy.deepcopy(self.model.config)
        settings.dtype = DTYPES[self.dtype]
        settings.save_pretrained(directory)


def is_weight_file(file: Path) -> bool:
    """Whether a file of a model's folder holds weights, by its name."""
    return any(file.match(pattern) for pattern in WEIGHT_FILES)


def load_policy(config: ModelConfig, learner: LearnerConfig, ctx: RankContext) -> Policy:
    """Load, shard and lay out the model of `config.path`; InputError when it is not a folder with a causal LM.

    Parameters are float32 whatever model.dtype is: steps of 1e-6 vanish in bfloat16. With model.dtype = 'bfloat16'
    FSDP gathers them as bfloat16 and reduces gradients in float32. A float32 model on one rank is not sharded,
    which would only copy it.
    """
    source = Path(config.path)
    model = _load(source, config.attention)
    _check_names(model, source)
    _prepare(model, config.gradient_checkpointing)
    return _place(model, source, config, learner, ctx)


def load_reference(folder: str | None, policy: Policy, config: ModelConfig, learner: LearnerConfig) -> Policy:
    """A frozen policy from `folder`, or from model.path, sharded and laid out like `policy`.

    It keeps only parameters, in model.dtype: 2 or 4 bytes each over the ranks, beside the 16 of a trained one.
    Raises InputError when it cannot score every token of the policy's vocabulary.
    """
    source = Path(folder if folder is not None else config.path)
    model = _load(source, config.attention, "model.path" if folder is None else "algorithm.kl.reference")
    model.eval().requires_grad_(False)
    own, needed = (each.config.get_text_config().vocab_size for each in (model, policy.model))
    if own < needed:
        raise InputError(
            f"algorithm.kl.reference = {folder!r} knows {own} tokens, and the policy {needed}; the two must share a "
            "tokenizer: choose a model of the same family"
        )
    return _place(model, source, config, learner, policy.ctx)


def _place(
    model: PreTrainedModel, source: Path, config: ModelConfig, learner: LearnerConfig, ctx: RankContext
) -> Policy:
    """Choose the layout, then shard the model, or move it to the device of a rank alone."""
    scorer = CompletionScorer(model, learner.logprob_chunk_tokens)
    packed = choose_layout(scorer, config.attention)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[config.dtype])
    if ctx.world > 1 or config.dtype != "float32":
        _shard(scorer, ctx, DTYPES[config.dtype])
    else:
        scorer.to(ctx.device)
    return Policy(scorer, source, ctx, config.dtype, packed)


def _load(source: Path, attn: str, setting: str = "model.path") -> PreTrainedModel:
    """The model in `source`, which `setting` names, float32 on CPU."""
    if not (source / "config.json").is_file():
        raise InputError(
            f"{setting} = {str(source)!r}: no {'config.json in that folder' if source.is_dir() else 'such folder'}; "
            "it must be a folder with a Hugging Face model (config.json, *.safetensors, tokenizer)"
        )
    try:
        settings = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:  # no JSON, or an architecture that this transformers does not know
        raise InputError(f"{setting} = {str(source)!r}: config.json cannot be used: {error}") from error
    if type(settings) not in AutoModelForCausalLM._model_mapping:
        raise InputError(
            f"{setting} = {str(source)!r}: a {settings.model_type!r} model is not a causal language model of "
            "transformers; choose one that AutoModelForCausalLM loads"
        )
    disable_progress_bar()
    implementation = "sdpa" if attn == "auto" else attn
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation=implementation, output_loading_info=True
    )
    model: PreTrainedModel
    model, report = loaded
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise InputError(
            f"{setting} = {str(source)!r}: the checkpoint lacks {len(missing)} parameters, such as {missing[0]!r}; "
            "they would be random. Is it the checkpoint of another architecture, or of a base model without its head?"
        )
    return model


def _check_names(model: PreTrainedModel, source: Path) -> None:
    """Publications use the model's names; refuse a model whose checkpoint (which engines read) names them otherwise."""
    files = sorted(source.glob("*.safetensors"))
    stored: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as handle:
            stored |= set(handle.keys())
    strange = sorted(name for name, _ in model.named_parameters() if files and name not in stored)
    if strange:
        raise InputError(
            f"model.path = {str(source)!r}: {len(strange)} parameters, such as {strange[0]!r}, have other names in the "
            f"checkpoint ({', '.join(sorted(stored)[:2])}, ...), and engines could not load their updates; save the "
            "model with transformers' save_pretrained first, or choose another architecture"
        )


def _prepare(model: PreTrainedModel, gradient_checkpointing: bool) -> None:
    """Dropout off: the learner must score what the engine sampled. Checkpointing needs its layers in train mode."""
    model.eval()
    if gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise InputError(
                f"model.gradient_checkpointing = true: {type(model).__name__} does not support it; set it to false"
            )
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in decoder_layers(model):
            layer.training = True


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The largest list of layers in the model, which is the stack of decoder layers; InputError when there is none."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not stacks:
        raise InputError(f"{type(model).__name__} has no list of layers that could be sharded; choose another model")
    return [*max(stacks, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()))]


def _shard(scorer: CompletionScorer, ctx: RankContext, dtype: torch.dtype) -> None:
    """FSDP2: every decoder layer on its own, everything else with the root."""
    mesh = init_device_mesh(ctx.device.type, (ctx.world,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(scorer.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(scorer, mesh=mesh, mp_policy=precision)
