"""The outer step of a pair, without a step of all: NoLoCo (arXiv 2506.10911, equations 1 to 3).

Each node i has slow weights phi_i and an outer momentum m_i of its own. After its inner steps, of AdamW or Muon, led it
to theta_i, it meets one other node. With g_i = phi_i - theta_i, and means over the two,

    m_i <- mu * m_i + eta * mean g + gamma * (phi_i - mean phi);    phi_i <- phi_i - m_i

The last term, which Nesterov's has not, pulls the two together; nothing else does, as no two nodes ever need the same
phi. Its variance over the nodes stays bounded where mu < gamma < 2 + mu, for pairs. Who meets nobody takes the step
with its own g, and no pull: phi_i - mean phi is then zero.

Departures from the paper: gamma is eta, as in its authors' code, so that eta = 1, mu = 0 makes the two meet at the mean
of their theta. Both g come as they were encoded, each node's own as well, so that both take the same mean, and what the
encoding left out is added to the next g. Routing of activations between pipeline stages, the other half of the paper,
has no meaning here: every node has the whole model.

Factored Gossip DiLoCo (2606.22768) splits the mixing in two, and so is this: phi does not change during inner steps, so
it travels meanwhile (no staleness); only g, which a codec makes small, is waited for. That paper may mix phi with other
nodes than g; here it is the same pair, whose two means then belong together.
"""

from __future__ import annotations

import numpy as np

from swarmnode.training import mapped
from swarmnode.training.codecs import Codec, codec
from swarmnode.training.codecs.feedback import is_finite
from swarmnode.training.outer import OuterState, Vector, frozen, steps_of


def weights_codec(name: str) -> Codec:
    """How phi travels where g is encoded by the codec called `name`: as it is beside fp32, else in 16 bits.

    Weights are no differences. Rounded to 11 significant bits, they move by less than a hundredth of what a round does.
    """
    return codec("fp32" if name == "fp32" else "fp16")


def gossip_step(
    state: OuterState, own: Vector, other: Vector | None, weights: Vector | None, *, lr: float, momentum: float
) -> OuterState:
    """The step of one node of a pair: `own` and `other` are g of this node and of the one it met, `weights` its phi.

    All float32 (P,); the last two are None for who meets nobody. Each product and sum is rounded to float32 on its own,
    and mean(a, b) is 0.5 * (a + b), so that both of a pair have the same mean g. Returns a new state with read-only
    arrays; the momentum of the old one where `momentum` is 0. Raises ValueError where shapes or dtypes differ, or new
    parameters would not be finite.
    """
    size = state.parameters.size
    for vector in (own, other, weights):
        if vector is not None and (vector.shape != (size,) or vector.dtype != np.float32):
            raise ValueError(f"a vector of the pair is {vector.dtype} {vector.shape}, parameters are ({size},)")
    rate, mu, half = np.float32(lr), np.float32(momentum), np.float32(0.5)
    parameters = mapped.zeros(size)
    velocity = mapped.zeros(size) if mu else state.momentum
    for part in steps_of(size):
        step = own[part].copy() if other is None else half * (own[part] + other[part])
        if weights is not None:
            step += half * (state.parameters[part] - weights[part])  # phi_i - mean phi, as gamma is eta
        step *= rate
        if mu:
            step += mu * state.momentum[part]
            velocity[part] = step
        np.subtract(state.parameters[part], step, out=parameters[part])
    if not is_finite(parameters):
        raise ValueError("the step leads to parameters that are NaN or infinite")
    return OuterState(frozen(parameters), frozen(velocity))
