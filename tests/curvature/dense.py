"""Dense references by autograd: Jacobians of every example, GGN, Fisher."""

import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev

Params = dict[str, Tensor]


def jacobians(net, x, names):
    """(N, K, D): the derivative of every example's outputs in all weights."""
    params = {name: value.detach() for name, value in net.named_parameters()}
    rows = []
    for n in range(len(x)):
        own = {name: params[name].clone().requires_grad_() for name in names}
        outputs = functional_call(net, params | own, (x[n : n + 1],)).reshape(-1)
        each = [torch.autograd.grad(f, list(own.values()), retain_graph=True) for f in outputs]
        rows.append(torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in each]))
    return torch.stack(rows)


def hessians(log_prob, f, y):
    """(N, K, K): the Hessian of −log p(y_n | f_n)."""
    each = [
        jacrev(jacrev(lambda v, n=n: -log_prob(v.reshape(1, *f.shape[1:]), y[n : n + 1]).sum()))(
            f[n].reshape(-1)
        )
        for n in range(len(f))
    ]
    return torch.stack(each)


def ggn(jacobian, h):
    """Σ_n J_nᵀ·H_n·J_n, (D, D)."""
    return torch.einsum("nkd,nkl,nle->de", jacobian, h, jacobian)


def scores(log_prob, f, y):
    """(N, K): ∇_f log p(y_n | f_n)."""
    each = [
        grad(lambda v, n=n: log_prob(v.reshape(1, *f.shape[1:]), y[n : n + 1]).sum())(
            f[n].reshape(-1)
        )
        for n in range(len(f))
    ]
    return torch.stack(each)
