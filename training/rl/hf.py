"""Policies that are causal language models of `transformers`, by name or from a local folder: the extra `hf`. Torch.

    policy = load("Qwen/Qwen2.5-0.5B-Instruct", seed=1)              # LoRA; trained=Trained.ALL for all parameters
    policy.vocabulary.prompt("a304=")                                # in the chat template, where there is one

A model is read from safetensors, and no code of a repository is ever run. The end-of-sequence token ends an answer and
is trained. Answers travel as text (`groups.as_text`), with the tokenizer's id beside it: whoever has another tokenizer
writes the text in its own tokens.

LoRA (Hu et al., 2106.09685) trains a few numbers beside the frozen weights of a model, without `peft`. Several sets of
adapters share one model: a policy and its reference cost one set of weights together.

    base = Adapted(model, rank=16)                        # freezes it; sets hooks on its linear layers
    adapters = base.fresh(seed=1)                         # A and B of each layer, B = 0: the model is as it was
    with base.using(adapters):
        model(tokens)                                     # W x + (alpha / rank) B A x in every layer
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.training.hf_lm import open_model
from swarmnode.training.rl.policies import PolicyState, content_hash
from swarmnode.training.rl.vocabulary import before, register
from swarmnode.training.tasks import TaskError

RANK = 16  # of LoRA
CONTEXT = 2048  # tokens of a prompt and its answer at the most, whatever more the model could read


class Trained(Enum):
    """What learning changes."""

    LORA = "hf"
    ALL = "hf-full"


class Tokenizer:
    """Implements `Vocabulary` over a tokenizer of `transformers`."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        """`size`: rows of the model's embedding, at least as many as the tokenizer has. Raises TaskError."""
        if tokenizer.eos_token_id is None:
            raise TaskError("the tokenizer has no end-of-sequence token, so that no answer could end")
        self._tokenizer = tokenizer
        self.size, self.end = size, int(tokenizer.eos_token_id)
        words = sorted(tokenizer.get_vocab().items())
        told = repr((words, self.end, tokenizer.chat_template, _rules(tokenizer)))
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
        written = self._tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        return self.encode(written)


def _rules(tokenizer: Any) -> str:
    """How text is cut into tokens, where the tokenizer says it: two with the same words may do it differently."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    return str(fast.to_str()) if fast is not None else type(tokenizer).__name__


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


class HFPolicy(nn.Module):
    """Implements `Policy`. Its parameters are those that are trained, in float32: of LoRA, or all of the model's."""

    def __init__(self, model: Any, tokenizer: Tokenizer, *, trained: Trained, seed: int, source: str = "") -> None:
        """`source`: the folder, or the name on the hub, from which another program can read its shape."""
        super().__init__()
        self.source = source
        self.vocabulary = tokenizer
        limit = getattr(model.config, "max_position_embeddings", None) or CONTEXT
        self.context = min(CONTEXT, int(limit))
        self.base_hash = content_hash(model)
        self._adapted: Adapted | None = None
        if trained is Trained.ALL:
            self.model = model
        else:
            self._adapted = Adapted(model, rank=RANK)
            self.adapters = nn.ParameterList(map(nn.Parameter, self._adapted.fresh(seed=seed)))

    @property
    def head(self) -> nn.Module:
        head: nn.Module = self._model.get_output_embeddings()
        return head

    @property
    def config(self) -> Any:
        """The model's shape, as `transformers` has it."""
        return self._model.config

    def forward(self, tokens: Tensor) -> Tensor:
        return self._run(tokens, None)[0]

    def begin(self, tokens: Tensor) -> tuple[Tensor, PolicyState]:
        logits, past = self._run(tokens, None, cached=True)
        return logits[:, -1], Cache(past)

    def step(self, tokens: Tensor, state: PolicyState) -> tuple[Tensor, PolicyState]:
        assert isinstance(state, Cache)
        logits, past = self._run(tokens.view(-1, 1), state.past, cached=True)
        return logits[:, 0], Cache(past)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights of the model as they are now, under the names of its files, adapters merged in one at a time."""
        from transformers.core_model_loading import revert_weight_conversion

        tied = self._model.all_tied_weights_keys
        state = {name: tensor for name, tensor in self._model.state_dict().items() if name not in tied}
        if not getattr(self._model, "_weight_conversions", None):
            yield from ((name, self._merged(name, tensor)) for name, tensor in state.items())
            return
        whole = {name: self._merged(name, tensor) for name, tensor in state.items()}
        yield from revert_weight_conversion(self._model, whole).items()

    def _merged(self, name: str, tensor: Tensor) -> Tensor:
        if self._adapted is None:
            return tensor
        return self._adapted.merged(name.removesuffix(".weight"), tensor, list(self.adapters))

    def __deepcopy__(self, memo: dict[int, Any]) -> HFPolicy:
        """With LoRA, adapters of its own on the same frozen model."""
        if self._adapted is not None:
            memo[id(self._adapted)] = self._adapted
        memo[id(self.vocabulary)] = self.vocabulary
        other = HFPolicy.__new__(HFPolicy)
        memo[id(self)] = other
        other.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return other

    @property
    def _model(self) -> Any:
        return self.model if self._adapted is None else self._adapted.model

    def _run(self, tokens: Tensor, past: Any, *, cached: bool = False) -> tuple[Tensor, Any]:
        """Logits (B, T, V) in float32 where `tokens` (B, T) are, and the cache; texts are padded at their right end."""
        given = {"input_ids": tokens.to(self._model.device), "past_key_values": past, "use_cache": cached}
        if self._adapted is None:
            out = self.model(**given)
        else:
            with self._adapted.using(list(self.adapters)):
                out = self._model(**given)
        return out.logits.float().to(tokens.device), out.past_key_values


def load(name: str, *, seed: int, trained: Trained = Trained.LORA) -> HFPolicy:
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
    return HFPolicy(model, tokenizer, trained=trained, seed=seed, source=where)


# -- LoRA

ALPHA = 2.0  # scale of the change is ALPHA, whatever the rank: alpha = 2 · rank, as is usual


class Adapted:
    """A frozen model with places for adapters, A (rank, in) and B (out, rank) of one layer after another.

    `model` stays usable: without adapters it is as before.
    """

    def __init__(self, model: nn.Module, *, rank: int) -> None:
        """Raises ValueError where the model has no linear layer but its head."""
        self.model, self.rank = model.requires_grad_(False), rank
        self._active: Sequence[Tensor] | None = None
        head = getattr(model, "get_output_embeddings", lambda: None)()
        self._shapes: dict[str, tuple[int, int]] = {}  # (in, out)
        for name, module in model.named_modules():
            shape = _in_out(module)
            if shape is not None and module is not head:
                module.register_forward_hook(self._hook(2 * len(self._shapes)))
                self._shapes[name] = shape
        if not self._shapes:
            raise ValueError("the model has no linear layers to adapt")

    def fresh(self, *, seed: int) -> list[Tensor]:
        """Adapters that change nothing yet; A is random, as `seed` says, uniform as in `nn.Linear`."""
        generator = torch.Generator().manual_seed(seed)
        adapters = []
        for inputs, outputs in self._shapes.values():
            bound = 1 / math.sqrt(inputs)
            a = torch.empty(self.rank, inputs).uniform_(-bound, bound, generator=generator)
            adapters += [a, torch.zeros(outputs, self.rank)]
        return adapters

    @contextmanager
    def using(self, adapters: Sequence[Tensor]) -> Iterator[None]:
        """The model with these adapters, for as long as the block lasts."""
        before, self._active = self._active, adapters
        try:
            yield
        finally:
            self._active = before

    @torch.no_grad()
    def merged(self, name: str, weight: Tensor, adapters: Sequence[Tensor]) -> Tensor:
        """The weight of one layer with its adapter in it, of the same shape and type: W + ALPHA B A."""
        if name not in self._shapes:
            return weight
        place = 2 * list(self._shapes).index(name)
        a, b = (part.detach().to(weight.device) for part in adapters[place : place + 2])
        change = ALPHA * (b @ a)  # (out, in)
        change = change if isinstance(self.model.get_submodule(name), nn.Linear) else change.T
        return (weight.float() + change).to(weight.dtype)

    def _hook(self, place: int) -> Any:
        def add(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if self._active is None:
                return output
            a, b = self._active[place : place + 2]
            x = given[0]  # (..., in)
            change: Tensor = (x.float() @ a.T.to(x.device)) @ b.T.to(x.device)  # (..., out)
            return output + (ALPHA * change).to(output.dtype)

        return add


def _in_out(module: nn.Module) -> tuple[int, int] | None:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D":  # of GPT-2 in transformers: a linear layer, its weight (in, out)
        inputs, outputs = module.weight.shape
        return int(inputs), int(outputs)
    return None
