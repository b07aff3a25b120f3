"""Policies that are causal language models of `transformers`, by name or from a local folder: the extra `hf`. Torch.

    policy = load("Qwen/Qwen2.5-0.5B-Instruct", seed=1)              # LoRA; lora=False trains all parameters
    policy.vocabulary.prompt("a304=")                                # in the chat template, where there is one

A model is read from safetensors, and no code of a repository is ever run. The end-of-sequence token ends an answer and
is trained. Answers travel as text (`groups.as_text`), with the tokenizer's id beside it: whoever has another tokenizer
writes the text in its own tokens.

LoRA (Hu et al., 2106.09685) trains a few numbers beside the frozen weights of a model. A copy of a policy has adapters
of its own on the same weights: a policy and its reference cost one set of them together.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from swarmnode.training.hf_lm import attach_lora, open_model
from swarmnode.training.rl.policies import Policy, PolicyState, parameter_hash
from swarmnode.training.rl.vocabulary import before, register
from swarmnode.training.tasks import TaskError

RANK = 16  # of LoRA
ALPHA = 32.0  # twice the rank, as is usual
# Before a chat template, which may tell today's date: all who read a question have to read the same tokens.
SAME_DATE = """{% macro strftime_now(how) -%}
{{ how | replace("%d", "26") | replace("%b", "Jul") | replace("%B", "July") | replace("%m", "07")
| replace("%Y", "2024") }}{% endmacro %}
"""
CONTEXT = 2048  # tokens of a prompt and its answer at the most, whatever more the model could read


class Tokenizer:
    """Implements `Vocabulary` over a tokenizer of `transformers`."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        """`size`: rows of the model's embedding, at least as many as the tokenizer has. Raises TaskError."""
        if tokenizer.eos_token_id is None:
            raise TaskError("the tokenizer has no end-of-sequence token, so that no answer could end")
        self._tokenizer = tokenizer
        self.size, self.end = size, int(tokenizer.eos_token_id)
        words = sorted(tokenizer.get_vocab().items())
        # How text is cut, where the tokenizer says it: two with the same words may do it differently.
        fast = getattr(tokenizer, "backend_tokenizer", None)
        rules = str(fast.to_str()) if fast is not None else type(tokenizer).__name__
        told = repr((words, self.end, tokenizer.chat_template, rules))
        self.id = "hf-" + hashlib.sha256(told.encode(errors="replace")).hexdigest()[:32]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        ended = list(before(ids, self.end))
        text = self._tokenizer.decode(ended, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def prompt(self, text: str) -> list[int]:
        if not self._tokenizer.chat_template:
            begin = self._tokenizer.bos_token_id
            return ([begin] if begin not in (None, self.end) else []) + self.encode(text)
        asked = [{"role": "user", "content": text}]
        template = SAME_DATE + self._tokenizer.get_chat_template()
        written = self._tokenizer.apply_chat_template(
            asked, chat_template=template, add_generation_prompt=True, tokenize=False
        )
        return self.encode(written)


@dataclass
class Cache:
    """Keys and values of a batch, as the model keeps them."""

    past: Any

    def repeat(self, times: int) -> Cache:
        self.past.batch_repeat_interleave(times)
        return self

    def kept(self, rows: Tensor) -> Cache:
        self.past.batch_select_indices(rows)
        return self


class HFPolicy(Policy):
    """Its parameters are those that are trained, in float32: of LoRA, or all of the model's."""

    def __init__(self, model: Any, tokenizer: Tokenizer, *, lora: bool, seed: int, source: str = "") -> None:
        """`source`: the folder, or the name on the hub, from which another program can read its shape."""
        super().__init__()
        self.source = source
        self.vocabulary = tokenizer
        limit = getattr(model.config, "max_position_embeddings", None) or CONTEXT
        self.context = min(CONTEXT, int(limit))
        self.base_hash = parameter_hash(model)
        if lora:
            attach_lora(model, rank=RANK, alpha=ALPHA, seed=seed)
        self.model = model

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that are trained, and so `parameters` as well."""
        return (each for each in super().named_parameters(*args, **kwargs) if each[1].requires_grad)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights of the model as they are now, under the names of its files, adapters merged in one at a time."""
        from transformers.core_model_loading import revert_weight_conversion

        if getattr(self.model, "_weight_conversions", None):
            yield from revert_weight_conversion(self.model, dict(self._merged())).items()
        else:
            yield from self._merged()

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        tied = self.model.all_tied_weights_keys
        for name, tensor in self.model.state_dict().items():
            if name in tied or ".lora_" in name:
                continue
            layer, _, adapted = name.partition(".base_layer.")
            if adapted == "weight":
                change = self.model.get_submodule(layer).get_delta_weight("default").detach()
                tensor = (tensor.float() + change).to(tensor.dtype)
            yield name.replace(".base_layer.", "."), tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> HFPolicy:
        """With LoRA, adapters of its own on the same frozen weights."""
        memo |= {id(each): each for _, each in super().named_parameters() if not each.requires_grad}
        memo[id(self.vocabulary)] = self.vocabulary
        other = HFPolicy.__new__(HFPolicy)
        memo[id(self)] = other
        other.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return other

    def _run(self, tokens: Tensor, state: Any, *, cached: bool = True) -> tuple[Tensor, PolicyState]:
        past = None if state is None else state.past
        out = self.model(input_ids=tokens, past_key_values=past, use_cache=cached)
        return out.logits.float(), Cache(out.past_key_values)


def load(name: str, *, seed: int, lora: bool = True) -> HFPolicy:
    """The model called `name` on the hub, or in the folder `name`; its tokenizer is made known to this process.

    Raises TaskError where it cannot be had, as `open_model` does.
    """
    model = open_model(name)
    from transformers import AutoTokenizer

    where = model.config.name_or_path
    try:
        words = AutoTokenizer.from_pretrained(where, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TaskError(f"the tokenizer of the model {name!r} cannot be loaded: {error}") from error
    tokenizer = Tokenizer(words, max(len(words), int(model.get_output_embeddings().weight.shape[0])))
    register(tokenizer)
    return HFPolicy(model, tokenizer, lora=lora, seed=seed, source=where)
