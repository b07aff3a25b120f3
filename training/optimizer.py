"""The inner optimizer: AdamW for all parameters, or Muon for the matrices of hidden layers and AdamW for the others.

Or plain gradient descent, without moments and without weight decay: both are then the exchange's (`training/demo.py`).

Weight decay is decoupled and on matrices only (Loshchilov & Hutter 2019); betas (0.9, 0.95) as in nanoGPT. Muon (Jordan
et al. 2024) orthogonalises the momentum of a matrix; its steps are scaled to the size of AdamW's (2502.16982, section
2.2), as `torch.optim.Muon` does with match_rms_adamw. It has one moment for each parameter where AdamW has two.

Where nobody repeats the steps, matrices are orthogonalised in bfloat16, as usual: where a machine multiplies such
numbers, that takes a third of the time. What it rounds is amplified where singular values are small: one thread and two
end 0.02 apart after ten steps, too far to tell a lie (`verify/replay.py`). In a run with audits it is float32: 3e-6.

All moments lie in one flat vector: the first ones of all P parameters, then the second ones of AdamW's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from swarmnode.training.memory import TOGETHER
from swarmnode.training.ranks import ALONE, Ranks
from swarmnode.training.runspec import RunSpec

BETAS = (0.9, 0.95)
MOMENTUM = 0.95  # of Muon, Nesterov's
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration, as in torch.optim.Muon …
ITERATIONS = 5  # … likewise
RMS = 0.2  # of an update by AdamW: Muon's is made as large
HEADS = ("head", "lm_head")  # what a model calls the layer that gives logits, and …
ADAPTERS = "lora_"  # … what peft calls the matrices of an adapter: not for Muon


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """What Muon updates: weights of linear layers but for heads, whatever is tied to an embedding, and adapters."""
    embeddings = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    return {
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in HEADS and ADAPTERS not in name
    } - embeddings


def with_moments(model: nn.Module, spec: RunSpec) -> list[nn.Parameter]:
    """The parameters in the order of their moments, P + A elements: all, and once more those of AdamW."""
    if spec.inner.optimizer == "sgd":
        return []
    matrices = hidden_matrices(model) if spec.inner.optimizer == "muon" else set()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [*parameters, *(parameter for parameter in parameters if parameter not in matrices)]


class Optimizer:
    """Updates the trainable parameters of a model, which are views of one vector, as their gradients are of another."""

    def __init__(self, model: nn.Module, spec: RunSpec, ranks: Ranks = ALONE, moments: Tensor | None = None) -> None:
        """The gradients must be there already. `moments`: zeros (P + A,), where they are to lie elsewhere."""
        self._ranks = ranks
        self.inner = inner = spec.inner
        self._precision = torch.float32 if spec.audited else torch.bfloat16
        self.updates = 0
        trained = [parameter for parameter in ranks.own(model).parameters() if parameter.requires_grad]
        self._plain = [(parameter, parameter.grad) for parameter in trained] if inner.optimizer == "sgd" else []
        order = with_moments(model, spec)
        self.pieces = ranks.pieces_of(order)  # of this rank's moments
        sizes = [ranks.owned(parameter).numel() for parameter in order]
        if moments is None:
            moments = torch.zeros(sum(sizes), dtype=torch.float32, device=trained[0].device)
        self.moments = moments  # (P + A,)
        held: dict[nn.Parameter, list[Tensor]] = defaultdict(list)  # two moments of AdamW's, one of Muon's
        for whole, moment in zip(order, moments.split(sizes), strict=True):
            held[whole].append(moment)
        # By decay: each parameter, its gradient, its moments, how often it was updated. By shape: the first three.
        self._adamw: dict[float, list[tuple[Tensor, ...]]] = defaultdict(list)
        self._muon: dict[torch.Size, list[tuple[Tensor, ...]]] = defaultdict(list)
        for whole, both in held.items():
            parameter = ranks.owned(whole)
            row = parameter, parameter.grad, *(moment.view(parameter.shape) for moment in both)
            if len(both) == 1:
                self._muon[whole.shape].append(row)  # the shape with all ranks' rows
            else:
                updates = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self._adamw[inner.weight_decay if parameter.dim() >= 2 else 0.0].append((*row, updates))

    def count(self, updates: int) -> None:
        self.updates = updates
        for rows in self._adamw.values():
            for *_, seen in rows:
                seen.fill_(float(updates))

    @torch.no_grad()
    def step(self, warmth: float) -> None:
        """One update by the present gradients, at `warmth` times the learning rates."""
        for parameter, gradient in self._plain:
            parameter.add_(gradient, alpha=-self.inner.lr * warmth)
        for decay, rows in self._adamw.items():
            _adamw(rows, BETAS, self.inner.lr * warmth, decay, self.inner.eps)
        for shape, rows in self._muon.items():
            count = max(1, TOGETHER // shape.numel())
            for start in range(0, len(rows), count):
                parameters, gradients, first = map(list, zip(*rows[start : start + count], strict=True))
                self._step_matrices(shape, parameters, gradients, first, self.inner.muon_lr * warmth)
        self.updates += 1

    def _step_matrices(
        self, shape: torch.Size, matrices: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], lr: float
    ) -> None:
        """Muon's update of matrices of one shape, all together: that saves a third of the time of small ones.

        Ranks that have some rows each gather them, and all orthogonalise all.
        """
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        nesterov = torch._foreach_lerp(gradients, momenta, MOMENTUM)
        whole = self._ranks.gathered(torch.stack(nesterov).to(self._precision), shape)
        updates = self._ranks.rows_of(orthogonal(whole)).float().unbind()
        torch._foreach_mul_(matrices, 1 - lr * self.inner.weight_decay)
        torch._foreach_add_(matrices, updates, alpha=-lr * RMS * math.sqrt(max(shape)))


class Adam:
    """Adam (1412.6980) as `torch.optim.Adam` does it with its defaults and `fused`, bit for bit."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self._trained, self._lr = list(parameters), lr
        self.state: list[tuple[Tensor, ...]] = []  # of each parameter two moments and the updates, from the first on

    @torch.no_grad()
    def step(self) -> None:
        """One update of the parameters that have a gradient, which is then gone."""
        like = torch.zeros_like
        self.state = self.state or [(like(p), like(p), torch.zeros((), device=p.device)) for p in self._trained]
        rows = zip(self._trained, self.state, strict=True)
        if updated := [(p, p.grad, *row) for p, row in rows if p.grad is not None]:
            _adamw(updated, (0.9, 0.999), self._lr, 0.0, 1e-8)
        for parameter in self._trained:
            parameter.grad = None


def _adamw(rows: Sequence[tuple[Tensor, ...]], betas: tuple[float, float], lr: float, decay: float, eps: float) -> None:
    """By torch's function, not its class: that imports torch's compiler, two seconds and 70 MB of each start."""
    how = {"beta1": betas[0], "beta2": betas[1], "lr": lr, "weight_decay": decay, "eps": eps}
    parameters, gradients, first, second, updates = map(list, zip(*rows, strict=True))
    adamw(parameters, gradients, first, second, [], updates, fused=True, amsgrad=False, maximize=False, **how)


def orthogonal(matrices: Tensor) -> Tensor:
    """Each of some matrices (n, a, b) with its singular values moved near 1, by Newton-Schulz (Jordan et al. 2024)."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
