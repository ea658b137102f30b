"""Faults of zuko, nflows and normflows that ``bayou.flows.check`` found, each by itself and without
bayou.
"""

from __future__ import annotations

import nflows.nn.nets
import nflows.transforms as nft
import normflows as nf
import torch
import zuko
from torch import Tensor, nn


def resnet(inputs: int, outputs: int) -> nn.Module:
    return nflows.nn.nets.ResidualNet(inputs, outputs, hidden_features=16, num_blocks=1)


def lipschitz(dim: int) -> nn.Module:
    return nf.nets.LipschitzMLP([dim, 16, dim], init_zeros=False, lipschitz_const=0.9)


def moved(module: nn.Module) -> nn.Module:
    """Parameters that are not those of the initialization, for layers that begin as the
    identity.
    """
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module


def cnf_batch() -> str:
    """zuko CNF: the log-density of a row depends on the rows beside it"""
    torch.manual_seed(0)
    flow = moved(zuko.flows.CNF(2, hidden_features=(16, 16))).double()
    x = torch.randn(64, 2).double()
    together = flow().log_prob(x)
    alone = torch.stack([flow().log_prob(row) for row in x])
    return f"largest difference {(together - alone).abs().max():.1e}"


def cnf_ladj() -> str:
    """zuko CNF: the ladj is integrated a hundred times less precisely than the value
    (`trace_scale`)
    """
    torch.manual_seed(0)
    flow = moved(zuko.flows.CNF(2, hidden_features=(16, 16))).double()
    x = torch.randn(64, 2).double().requires_grad_()
    y, ladj = flow().transform.call_and_ladj(x)
    rows = [torch.autograd.grad(y[:, i].sum(), x, retain_graph=True)[0] for i in range(2)]
    truth = torch.linalg.slogdet(torch.stack(rows, 1))[1]
    return f"off log|det| of its own Jacobian by up to {(ladj - truth).abs().max():.1e}"


def cnf_eval() -> str:
    """zuko CNF: in eval mode the parameters have no gradient, without a word"""
    flow = zuko.flows.CNF(2, hidden_features=(16, 16)).eval()
    x = torch.randn(4, 2, requires_grad=True)
    flow().log_prob(x).sum().backward()
    missing = sum(p.grad is None for p in flow.parameters())
    return f"{missing} of {len(list(flow.parameters()))} parameters have the gradient None; that of x is there"


def bisection() -> str:
    """zuko SOSPF, NAF, UNAF, GF: an inverse that is not found is the end of its bracket, without a
    word
    """
    torch.manual_seed(0)
    transform = zuko.flows.NAF(1)().transform
    x = transform.inv(torch.tensor([50.0]))
    return f"the inverse of 50 is {x.item():.4f}, whose image is {transform(x).item():.2f}; [−10, 10] is documented"


def validation() -> str:
    """zuko: `import zuko` switches off the validation of all distributions of torch"""
    scale = torch.distributions.Normal(0.0, -1.0).scale
    return f"Normal(0, −1) is accepted, scale {scale:g}"


def fixed_point() -> str:
    """normflows Residual: a fixed point that does not settle is given back after 1,000 iterations,
    without a word
    """

    class Steep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(3 * x)  # y = x + tanh(3x) is a bijection, and no contraction

    flow = nf.flows.Residual(Steep(), reverse=False).eval()
    y, _ = flow(torch.tensor([[0.1, 0.2]]))
    return f"x = (0.1, 0.2) comes back as ({', '.join(f'{v:.2f}' for v in flow.inverse(y)[0][0].tolist())})"


def stopping() -> str:
    """normflows Residual: the stopping rule holds the square of a step against the tolerance, for
    all rows at once
    """
    torch.manual_seed(0)
    flow = nf.flows.Residual(lipschitz(2), reverse=False).double().eval()
    x = torch.randn(64, 2).double()
    together = flow.inverse(x)[0]
    alone = torch.cat([flow.inverse(row[None])[0] for row in x])
    back = flow(together)[0]
    return (
        f"atol = rtol = 1e-5, round trip off by {(back - x).abs().max():.0e}; "
        f"alone and in a batch a row differs by {(together - alone).abs().max():.0e}"
    )


def row_weights() -> str:
    """normflows Residual: the gradient of the ladj is weighted for all rows as for the first"""
    torch.manual_seed(0)
    flow = nf.flows.Residual(lipschitz(3), reverse=False)
    weight = torch.tensor([0.0, 1.0, 1.0, 1.0])
    _, ladj = flow(torch.randn(4, 3))
    first = next(p for p in flow.parameters() if p.ndim == 2)
    found = torch.autograd.grad((weight * ladj).sum(), first)[0].norm()
    return f"weights (0, 1, 1, 1) of the rows give a gradient of norm {found:g}; `reduce_memory=False` does not do it"


def residual_eval() -> str:
    """normflows Residual: in eval mode its estimated ladj has no gradient"""
    flow = nf.flows.Residual(lipschitz(3), reverse=False).eval()
    x = torch.randn(4, 3, requires_grad=True)
    return f"ladj.requires_grad: {flow(x)[1].requires_grad}"


def act_norm() -> str:
    """normflows ActNorm: the first batch sets its parameters in eval mode too; a single row makes
    them NaN
    """
    norm = nf.flows.ActNorm((2,)).eval()
    norm(torch.randn(1, 2))
    return f"ladj of the next batch: {norm(torch.randn(4, 2))[1].item()}"


def single_precision() -> str:
    """normflows NormalizingFlow, Planar (leaky_relu), Permute; nflows LeakyReLU: a float32 ladj for
    float64 rows
    """
    x = torch.randn(3, 2).double()
    model = nf.NormalizingFlow(
        nf.distributions.DiagGaussian(2), [nf.flows.AffineConstFlow((2,))]
    ).double()
    terms = f"{model.forward_and_log_det(x)[1].dtype} and {nft.LeakyReLU()(x)[1].dtype}"
    return f"{terms}; `log_prob` of the model is float64"


def naive_linear() -> str:
    """nflows NaiveLinear: the inverse calls `torch.solve`, which torch no longer has"""
    try:
        nft.NaiveLinear(2).inverse(torch.randn(3, 2))
    except RuntimeError as error:
        return f"RuntimeError: {str(error).splitlines()[0].split('. ')[0]}"
    return "fine"


def linear_spline() -> str:
    """nflows PiecewiseLinear…: its bins stand at float32 numbers, so that a float64 round trip is a
    float32 one
    """
    torch.manual_seed(0)
    spline = (
        nft.PiecewiseLinearCouplingTransform([1, 0], resnet, tails="linear", tail_bound=3.0)
        .double()
        .eval()
    )
    x = torch.randn(1000, 2).double().clamp(-2.9, 2.9)
    return f"round trip off by up to {(spline.inverse(spline(x)[0])[0] - x).abs().max():.0e}"


def saturation() -> str:
    """nflows Tanh, CompositeCDFTransform(Sigmoid, ...): where a float saturates, −∞ or another
    point
    """
    x = torch.tensor([[30.0]])
    cdf = nft.CompositeCDFTransform(nft.Sigmoid(), nft.PiecewiseRationalQuadraticCDF([1]))
    restored = cdf.inverse(cdf(x)[0])[0].item()
    return f"tanh(30): ladj {nft.Tanh()(x)[1].item()}; 30 through the CDF and back: {restored:.1f}"


FAULTS = (
    cnf_batch, cnf_ladj, cnf_eval, bisection, validation, fixed_point, stopping, row_weights, residual_eval, act_norm,
    single_precision, naive_linear, linear_spline, saturation,
)  # fmt: skip
