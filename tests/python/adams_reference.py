"""Independent references: AdamS over P ranks in NumPy, masked and dense, and AdamS as a plain torch
optimizer in the style of third parties. Written from docs/algorithm.md alone.
"""

import numpy as np
import torch

F = np.float32


def partition(n, ranks, q):
    """[begin, end) of rank q's share, in whole groups of 64 elements."""
    groups = -(-n // 64)
    share = -(-groups // ranks)
    return min(n, 64 * share * q), min(n, 64 * share * (q + 1))


class Simulation:
    """One registered buffer on P ranks, the fused role."""

    def __init__(
        self, theta, ranks, *, sparsity, beta1, beta2, eps, age_cap, dense, ramp, ramp_sparsity
    ):
        n = theta.size
        self.theta = theta.astype(F).copy()
        self.ranks = ranks
        self.schedule = (sparsity, dense, ramp, min(ramp_sparsity, sparsity))
        self.beta1, self.beta2, self.eps, self.age_cap = beta1, beta2, F(eps), age_cap
        self.m = np.zeros(n, F)
        self.last = np.full(n, -1)
        self.residual = [np.zeros(n, F) for _ in range(ranks)]
        self.mask = np.ones(n, bool)
        self.log_decay = [0.0]
        self.t = 0

    def sparsity_at(self, t):
        sparsity, dense, ramp, ramp_sparsity = self.schedule
        if self.ranks == 1 or t < dense:
            return 0.0
        return ramp_sparsity if t < ramp else sparsity

    def step(self, gradients, lr, decay):
        """One step; gradients has one array per rank."""
        t, mask = self.t, self.mask
        self.log_decay.append(self.log_decay[-1] + np.log1p(-lr * decay))
        u = [g.astype(F) + r for g, r in zip(gradients, self.residual)]
        mean = u[0][mask]
        for other in u[1:]:
            mean = mean + other[mask]
        mean = (mean / F(self.ranks)).astype(F)

        age = t - self.last[mask]
        b = (self.beta1**age).astype(F)
        b_before = (self.beta1 ** (age - 1)).astype(F)
        m = self.m[mask]
        ghat = mean / age.astype(F)
        moment = b * m + (F(1) - b) * ghat
        m_before = b_before * m + (F(1) - b_before) * ghat
        v = F(self.beta2) * m_before**2 + F(1 - self.beta2) * ghat**2
        log = np.array(self.log_decay)
        kept = np.exp(log[t + 1] - log[self.last[mask] + 1]).astype(F)
        length = F(lr) * np.minimum(age, self.age_cap).astype(F)
        self.theta[mask] = kept * self.theta[mask] - length * moment / (np.sqrt(v) + self.eps)
        self.m[mask] = moment
        self.last[mask] = t
        for i in range(self.ranks):
            self.residual[i] = np.where(mask, F(0), u[i])
        self._choose(t)
        self.t += 1

    def _choose(self, t):
        s = self.sparsity_at(t + 1)
        if s == 0:
            self.mask = np.ones_like(self.mask)
            return
        self.mask = np.zeros_like(self.mask)
        for i in range(self.ranks):
            begin, end = partition(self.m.size, self.ranks, (i + t) % self.ranks)
            if begin == end:
                continue
            age = (t + 1 - self.last[begin:end]).astype(np.int64)
            b = (self.beta1**age).astype(F)
            score = np.abs(
                age.astype(F) * b * self.m[begin:end] + (F(1) - b) * self.residual[i][begin:end]
            )
            k = max(1, round((1 - s) * (end - begin)))
            chosen = np.argsort(-score, kind="stable")[:k]
            self.mask[begin + chosen] = True


class ReferenceAdamS(torch.optim.Optimizer):
    """AdamS as somebody else would write it: a state per parameter, no flat buffers."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                v = beta2 * m * m + (1 - beta2) * p.grad * p.grad
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))
