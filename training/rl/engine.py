"""Which engine writes a policy's answers: the sampler in torch, or vLLM where it is installed and fits. Torch.

    writes = Engine(policy, "auto")                       # auto, torch or vllm; raises TaskError
    answers = writes(policy, prompts, Sampling(copies=8), seeds)
    writes.status                                         # "vllm", or "torch" with why: "vLLM does not start: …"

What `auto` does, and in what the two differ: docs/rollouts.md, "vLLM". It is imported only where it is taken.

`VLLMSampler` is an engine in this process with a second copy of the policy's weights. It does what `sampling.sample`
does: vLLM is given `sampling.draw` as a logits processor (`Drawing`), so that the same seeds draw the same tokens, the
end token a part of an answer and nothing else ending it. **Which weights**: before it samples it compares the hash of
the policy's parameters with that of what the engine holds, and where they differ the engine is given all of them,
adapters merged; and some answers of each call are read again by the policy's own prefill, whose log-probabilities must
be the same. So a model that vLLM computes otherwise is found at once.

vLLM starts no program here and opens no socket, as the trainer's sandbox demands (`_alone`), runs without compiling
anything, and reports to nobody. What is replaced of vLLM for that are parts of its inside, of version 0.32.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swarmnode.training.rl.hf import HFPolicy
from swarmnode.training.rl.noise import streams_of
from swarmnode.training.rl.policies import Policy, parameter_hash
from swarmnode.training.rl.proofs import FP32
from swarmnode.training.rl.sampling import Completion, Sampling, check_room, draw, read_tokens, sample
from swarmnode.training.tasks import TaskError

GO_ON = 'answers are sampled in torch, which is slower; `sampling = "torch"` asks for that without this warning'
KV_CACHE = 1 << 28  # bytes of keys and values; more where one text of the policy's whole context has more
KV_BLOCK = 128  # tokens for which vLLM on a CPU makes room at a time
AT_ONCE = 256  # answers
STEP_LOGITS = 1 << 24  # numbers of the logits of one step at the most: 64 MiB, several times over
READ_AGAIN = 4  # answers of a call
DRAWN_BY = "drawing"  # among what a request carries: the place of its answer
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_PLUGINS": "",  # what others installed beside it
    "TORCHDYNAMO_DISABLE": "1",  # a compiler is a program
}


@dataclass(frozen=True)
class EngineStatus:
    """What samples now, and why it is not vLLM where it was to be."""

    by: str  # torch, vllm
    why: str = ""  # for people; empty where nothing is amiss


class Engine:
    """Implements `Sampler` by one of two."""

    def __init__(self, policy: nn.Module, wanted: str) -> None:
        """`wanted`: auto, torch or vllm. Raises TaskError where vllm is asked for and cannot be had."""
        self.status = EngineStatus("torch")
        self._wanted = wanted
        self._vllm: VLLMSampler | None = None
        fits = isinstance(policy, HFPolicy) and next(policy.parameters()).device.type == "cpu"
        installed = find_spec("vllm") is not None
        if wanted == "torch" or (wanted == "auto" and not (fits and installed)):
            return
        if not fits:
            raise TaskError('sampling = "vllm" is for policies called hf:... on the CPU; this one is sampled in torch')
        if not installed:
            raise TaskError('sampling = "vllm", and vLLM is not installed here; docs/rollouts.md says how to')
        try:
            self._vllm = VLLMSampler(policy)
            self.status = EngineStatus("vllm")
        except Unusable as error:
            self._do_without(error)

    def __call__(
        self, policy: Policy, prompts: Sequence[Sequence[int]], how: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """As `sampling.sample`. Raises TaskError where vllm was asked for and fails."""
        if self._vllm is not None:
            try:
                return self._vllm(policy, prompts, how, seeds)
            except Unusable as error:
                self._do_without(error)
        return sample(policy, prompts, how, seeds)

    def _do_without(self, error: Unusable) -> None:
        if self._wanted == "vllm":
            raise TaskError(f'{error}; sampling = "auto" would go on in torch') from error
        self._vllm = None
        self.status = EngineStatus("torch", f"{error}; {GO_ON}")


class Unusable(Exception):
    """vLLM cannot sample for this policy on this machine. The message says why."""


class VLLMSampler:
    """Implements `Sampler` for one policy. The engine lasts as long as the process."""

    def __init__(self, policy: HFPolicy) -> None:
        """Raises Unusable."""
        self._held = ""  # hash of the weights in the engine
        self._drawings: dict[int, Drawing] = {}  # of the answers that are being written
        self._engine = _started(policy, self._drawings)
        how = Sampling(max_tokens=4, copies=2)  # what it cannot compute, it cannot from the first answer on
        self(policy, [[policy.vocabulary.end]], how, [0])

    def __call__(
        self, policy: Policy, prompts: Sequence[Sequence[int]], how: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """As `sampling.sample`. `policy` has the shape of the one that it was started for.

        Raises ValueError where a prompt exceeds the context, Unusable where vLLM fails or does not compute this policy.
        """
        check_room(policy, prompts, how)
        assert isinstance(policy, HFPolicy)
        asked = [list(prompt) for prompt in prompts for _ in range(how.copies)]
        drawings = [Drawing(how, seed, copy) for seed in seeds for copy in range(how.copies)]
        self._drawings.update(enumerate(drawings))
        try:
            with _undisturbed():
                self.give(policy)
                texts = _written(self._engine, asked, how, end=policy.vocabulary.end)
        except Exception as error:  # of a program that is not ours
            raise Unusable(f"vLLM failed while it sampled: {_words(error)}") from error
        finally:
            self._drawings.clear()
        written = [drawing.completion(tokens) for drawing, tokens in zip(drawings, texts, strict=True)]
        # Greedy choice tells the chances of the untempered distribution.
        readings = read_tokens(policy, asked[:READ_AGAIN], texts[:READ_AGAIN], how if how.temperature else Sampling())
        for reading, answer in zip(readings, written, strict=False):
            apart = float(np.abs(reading.logprobs - np.array(answer.logprobs, np.float32)).mean())
            if not apart <= FP32.logprobs:
                raise Unusable(
                    f"vLLM finds other log-probabilities than the policy itself: {apart:.2g} nats a token apart, where "
                    f"{FP32.logprobs:g} is rounding; so it does not compute this model in the same way"
                )
        return written

    def give(self, policy: HFPolicy) -> None:
        """Have the policy's weights in the engine, as they are now."""
        wanted = parameter_hash(policy)
        if wanted == self._held:
            return
        self._held = ""  # half of each, should what follows fail
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": policy.weights()})
        self._engine.apply_model(_renew_head)
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("keys and values of earlier weights could not be forgotten")
        self._held = wanted


def _renew_head(model: torch.nn.Module) -> None:
    """Pack the head's weight anew: on a CPU vLLM has a packed copy, which no reload renews where it is tied."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@dataclass
class Drawing:
    """What draws the tokens of one answer, in the place of vLLM's own sampler."""

    how: Sampling
    seed: int
    answer: int  # to its prompt, from 0 on
    logprobs: dict[int, float] = field(default_factory=dict)  # of the tokens drawn, by position

    def __call__(self, written: Sequence[int], logits: Tensor) -> Tensor:
        """Logits (V,) that leave the drawn token alone; `written` are those before it."""
        position = len(written)
        token, logprob = draw(logits[None], self.how, streams_of([self.seed], [self.answer], [position]))
        self.logprobs[position] = float(logprob)
        return torch.full_like(logits, -torch.inf).index_fill_(0, token, 0.0)

    def completion(self, tokens: Sequence[int]) -> Completion:
        return Completion(tuple(tokens), tuple(self.logprobs[position] for position in range(len(tokens))))


def _written(engine: Any, prompts: Sequence[list[int]], how: Sampling, *, end: int) -> list[list[int]]:
    """Tokens of one answer to each prompt, drawn as the `Drawing` at its place says."""
    from vllm import SamplingParams

    asked = [
        SamplingParams(
            temperature=0.0,  # what was drawn is likeliest
            max_tokens=how.max_tokens,
            extra_args={DRAWN_BY: place},
            stop_token_ids=[end],
            ignore_eos=True,  # whatever the model's files call an end: `end` is one, and nothing else
            detokenize=False,
        )
        for place in range(len(prompts))
    ]
    told = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in told]


def _processor(drawings: Mapping[int, Drawing]) -> type[Any]:
    """vLLM's interface to `Drawing`."""
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Drawn(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            return drawings.get((params.extra_args or {}).get(DRAWN_BY, -1))

    return Drawn


def kv_cache(policy: HFPolicy) -> int:
    """Bytes for keys and values, in which at least one text finds room; what is then too long waits its turn."""
    config = policy.model.config
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    text = 2 * 4 * config.num_hidden_layers * kept * width * (policy.context + KV_BLOCK)
    return max(KV_CACHE, text)


def _started(policy: HFPolicy, drawings: Mapping[int, Drawing]) -> Any:
    """An engine for models of this shape, its weights still random, that draws so. Raises Unusable."""
    os.environ.update(QUIET)
    scratch = os.environ.get("TMPDIR")
    if scratch:  # the trainer may write nowhere else
        os.environ.update(dict.fromkeys(("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"), os.path.join(scratch, "vllm")))
    try:
        with _undisturbed():
            from vllm import LLM
            from vllm.platforms import current_platform

            if not current_platform.is_cpu():
                raise Unusable(f"vLLM is installed for {current_platform.device_name}, and this policy is on the CPU")
            with _alone():
                return LLM(
                    policy.source,
                    dtype="float32",  # what the policy is trained in; anything less would be another policy
                    load_format="dummy",  # the weights come from the policy, before the first answer
                    skip_tokenizer_init=True,
                    generation_config="vllm",
                    logits_processors=[_processor(drawings)],
                    max_model_len=policy.context,
                    max_num_seqs=max(1, min(AT_ONCE, STEP_LOGITS // policy.vocabulary.size)),
                    kv_cache_memory_bytes=kv_cache(policy),
                    enforce_eager=True,
                    trust_remote_code=False,
                    disable_log_stats=True,
                )
    except Unusable:
        raise
    except Exception as error:  # of a program that is not ours
        raise Unusable(f"vLLM does not start: {_words(error)}") from error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """What vLLM sets or uses of the whole process is set back: chance, and the number of torch's threads."""
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    python, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)


@contextmanager
def _alone() -> Iterator[None]:
    """vLLM without the programs that it starts and the sockets that it opens, neither of which one process needs."""
    import torch.distributed as distributed
    import torch.testing._internal.distributed.fake_pg as single  # makes the backend `fake` known
    import vllm.model_executor.models.registry as registry
    import vllm.utils.cpu_resource_utils as cores
    import vllm.v1.executor.uniproc_executor as executor

    if not distributed.is_initialized():
        distributed.init_process_group("fake", store=single.FakeStore(), rank=0, world_size=1)
    new_group = distributed.new_group

    def group_of_one(*args: Any, **options: Any) -> Any:
        return new_group(*args, **{**options, "backend": "fake"})

    replaced = [
        (distributed, "new_group", group_of_one),  # gloo opens sockets, also where nobody is there to talk to
        (registry, "_run_in_subprocess", lambda inspect: inspect()),  # to spare a GPU what is done here anyway
        (cores, "_get_cpu_list", cores._synthesize_cpu_list),  # lscpu
        (executor, "Lock", threading.Lock),  # one that other processes share lies in /dev/shm
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    try:
        for place, name, value in replaced:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def _words(error: Exception) -> str:
    """What an error says, in one line of bearable length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
