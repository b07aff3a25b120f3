"""The task hf-lm: a causal language model of `transformers` learns the corpus, whole or by LoRA. The extra `hf`.

    [task]
    name = "hf-lm"
    [model]
    base = "HuggingFaceTB/SmolLM2-135M"        # or a folder; all nodes have the same one, known by its hash
    lora_rank = 16                             # 0 trains all parameters
    context = 512

What is trained is what is exchanged: of LoRA (Hu et al., 2106.09685) the adapters beside the base's linear layers,
which `peft` puts there. They begin as the run's seed says and change nothing at first. Nothing is left to chance in
training: dropout is off, so that whoever repeats a step finds the same. A model is read from safetensors in the folder
that the daemon found it in; no code of a repository is run.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.training.byte_lm import ByteLM
from swarmnode.training.gpt import GPT
from swarmnode.training.options import lacking
from swarmnode.training.runspec import RunSpec
from swarmnode.training.tasks import Assignment, TaskError


class HfLM(ByteLM):
    """A language model that begins from a base. Raises TaskError where that cannot be used, else as `ByteLM`."""

    @classmethod
    def build(cls, spec: RunSpec, assignment: Assignment) -> GPT:
        return _trained_as(spec, open_model(assignment.base, _kept_in(spec)))

    @classmethod
    def skeleton(cls, spec: RunSpec, assignment: Assignment) -> GPT:
        try:
            from transformers import AutoConfig, AutoModelForCausalLM

            shape = AutoConfig.from_pretrained(assignment.base, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise TaskError(f"the shape of the model {assignment.base!r} cannot be read: {error}") from error
        return _trained_as(spec, AutoModelForCausalLM.from_config(shape, dtype=_kept_in(spec)))


def _kept_in(spec: RunSpec) -> torch.dtype:
    """The type of the base's weights: what is trained is float32, what is frozen as the run computes."""
    frozen = spec.model.lora_rank > 0
    return torch.bfloat16 if frozen and spec.inner.precision == "bf16" else torch.float32


def _trained_as(spec: RunSpec, model: Any) -> CausalLM:
    if spec.model.lora_rank:
        attach_lora(model, rank=spec.model.lora_rank, alpha=spec.model.lora_alpha, seed=spec.run.seed)
    found = CausalLM(model, context=spec.model.context)
    if spec.data.vocabulary > found.vocabulary:
        raise TaskError(
            f"[data] vocabulary = {spec.data.vocabulary} is more than the {found.vocabulary} tokens of the base; begin "
            "a new run with the base's own tokenizer, by leaving vocabulary and --tokenizer out"
        )
    return found


class CausalLM(GPT):
    """Tokens in, logits out: a model of `transformers` as a task's model. What of it is trained requires a gradient."""

    def __init__(self, model: Any, *, context: int) -> None:
        """Raises TaskError for a context that is longer than the model reads, or state that would not be exchanged."""
        nn.Module.__init__(self)
        self.limit = getattr(model.config, "max_position_embeddings", None) or context
        if context > self.limit:
            raise TaskError(
                f"[model] context = {context} is longer than the base model reads, {self.limit} tokens; lower it"
            )
        kept = set(model.state_dict()) & {name for name, _ in model.named_buffers()}
        if kept and all(parameter.requires_grad for parameter in model.parameters()):
            raise TaskError(
                f"the base model keeps {', '.join(sorted(kept)[:3])} beside its parameters, which nobody exchanges, so "
                "that its copies would drift apart; train it by LoRA: [model] lora_rank = 16"
            )
        self.model, self.context = model, context
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])

    @property
    def checkpointing(self) -> bool:
        """Whether each layer's activations are computed anew in the backward pass, rather than kept."""
        return any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        if on:
            try:
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
            except ValueError as error:
                raise TaskError(f"[inner] checkpointing: {error}; leave it out") from error
            for module in self.model.modules():  # what is in a layer stays as it is in evaluation
                module.training = hasattr(module, "gradient_checkpointing")

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of what follows each of `tokens` (B, T)."""
        B, T = tokens.shape
        # A text without values, of which memory is weighed, has to be told to have no gaps.
        mask = torch.zeros(1, 1, 1, 1, device="meta").expand(B, 1, T, T) if tokens.is_meta else None
        return self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits

    def following(self, text: Tensor, read: Any) -> tuple[Tensor, Any]:
        """As for any GPT, and of all that was written since, as far as the base reads; `read`: its keys and values."""
        if text.shape[1] > self.limit:
            return super().following(text, None)
        new = text[:, -self.context :] if read is None else text[:, -1:]
        found = self.model(input_ids=new, past_key_values=read, use_cache=True)
        return found.logits[0, -1], getattr(found, "past_key_values", None)


def open_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model called `name` on the hub, or in the folder `name`, without dropout.

    Only what is on this machine already is used: the daemon fetches what its owner names, and whoever writes a run file
    decides nothing about this machine. Raises TaskError where it is not here.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise TaskError(lacking("models of transformers need that package", error, "swarmnode[hf]")) from error
    where = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
    safe = {"trust_remote_code": False, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(where, **safe)
        for key, value in config.to_dict().items():
            if ("drop" in key or key.endswith("pdrop")) and isinstance(value, float):
                setattr(config, key, 0.0)
        model = AutoModelForCausalLM.from_pretrained(where, config=config, dtype=dtype, use_safetensors=True, **safe)
    except (OSError, ValueError, KeyError, ImportError) as error:
        hint = "; a model that is not on this machine is fetched only where --base or --policy names it"
        raise TaskError(f"the model {name!r} cannot be loaded: {error}{hint}") from error
    return model.eval()


def attach_lora(model: Any, *, rank: int, alpha: float, seed: int) -> None:
    """Freeze the model and put adapters beside all of its linear layers but the head: W x + (alpha / rank) B A x.

    In float32. B = 0, so that the model is as it was; A is uniform as in `nn.Linear`, by the seed. Raises TaskError.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from transformers.pytorch_utils import Conv1D  # a linear layer of GPT-2

        head = model.get_output_embeddings()
        linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
        # Named one by one: "all-linear" is more to peft where a model has experts, and what is exported would not load.
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=linear), model)
    except ImportError as error:
        raise TaskError(lacking("LoRA needs peft", error, "swarmnode[hf]")) from error
    except ValueError as error:
        raise TaskError(f"the model has no linear layers for LoRA: {error}") from error
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                bound = 1 / math.sqrt(parameter.shape[1])
                parameter.data.uniform_(-bound, bound, generator=generator)
