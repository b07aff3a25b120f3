"""Which engine writes a policy's answers: the sampler in torch, or vLLM where it is installed and fits. Torch.

    writes = Engine(policy, "auto")                       # auto, torch or vllm; raises TaskError
    answers = writes(policy, prompts, copies=8, how=how, generator=generator)
    writes.told                                           # Told("vllm"), or Told("torch", "vLLM does not start: …")

`auto` takes vLLM for `hf` policies where it can be imported, and torch where it fails, now or later: that is told once,
and training goes on. Whoever asks for `vllm` by name gets an error instead. vLLM is imported only where it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import nn

from swarmnode.training.rl.hf import HFPolicy
from swarmnode.training.rl.policies import Policy
from swarmnode.training.rl.sampling import Answer, Sampler, Sampling, sample
from swarmnode.training.rl.vllm_sampling import Unusable, VLLMSampler
from swarmnode.training.tasks import TaskError

GO_ON = 'answers are sampled in torch, which is slower; `sampling = "torch"` asks for that without this warning'


@dataclass(frozen=True)
class Told:
    """What samples now, and why it is not vLLM where it was to be."""

    by: str  # torch, vllm
    why: str = ""  # for people; empty where nothing is amiss


def _is_installed() -> bool:
    return find_spec("vllm") is not None


class Engine:
    """Implements `Sampler` by one of two."""

    def __init__(
        self,
        policy: nn.Module,
        wanted: str,
        *,
        start: Callable[[HFPolicy], Sampler] = VLLMSampler,
        installed: Callable[[], bool] | None = None,
    ) -> None:
        """`wanted`: auto, torch or vllm. Raises TaskError where vllm is asked for and cannot be had."""
        installed = installed or _is_installed
        self.told = Told("torch")
        self._wanted = wanted
        self._vllm: Sampler | None = None
        if wanted == "torch" or (wanted == "auto" and not (isinstance(policy, HFPolicy) and installed())):
            return
        if not isinstance(policy, HFPolicy):
            raise TaskError('sampling = "vllm" is for policies called hf:...; this one is sampled in torch')
        if not installed():
            raise TaskError('sampling = "vllm", and vLLM is not installed here; docs/rollouts.md says how to')
        try:
            self._vllm = start(policy)
            self.told = Told("vllm")
        except Unusable as error:
            self._do_without(error)

    def __call__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        *,
        copies: int,
        how: Sampling,
        generator: torch.Generator,
        traced: bool = False,
    ) -> list[Answer]:
        """As `sampling.sample`. Raises TaskError where vllm was asked for and fails."""
        if self._vllm is not None:
            try:
                return self._vllm(policy, prompts, copies=copies, how=how, generator=generator, traced=traced)
            except Unusable as error:
                self._do_without(error)
        return sample(policy, prompts, copies=copies, how=how, generator=generator, traced=traced)

    def _do_without(self, error: Unusable) -> None:
        if self._wanted == "vllm":
            raise TaskError(f'{error}; sampling = "auto" would go on in torch') from error
        self._vllm = None
        self.told = Told("torch", f"{error}; {GO_ON}")
