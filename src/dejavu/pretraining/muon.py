"""Muon (Jordan et al., 2024) for the MLP's matrices, AdamW for all else, as one optimizer.

A matrix is moved by its momentum made orthogonal, so that every direction of it learns at the same rate. On opt-tiny's
text that needs a fraction of AdamW's tokens: the training loss after the first 0.2 million is 5.7 nats against 7.9.
Attention is left to AdamW: with its matrices moved by Muon as well, 10 million tokens gave a model in which all heads
matter alike, so that leaving out the least important quarter of them cost 0.16 nats (AdamW's model: 0.01), which is not
how OPT is.

torch.optim.Muon works in bfloat16, which a CPU without matrix units emulates at seconds a step; here matrices of equal
shape go through float32 products together, 0.2 s a step. Shape suffixes: M matrices, R rows <= C columns.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

MOMENTUM = 0.95
BETAS, EPSILON = (0.9, 0.95), 1e-8
# Newton-Schulz polynomial of Jordan et al.: after five rounds singular values lie between 0.7 and 1.2.
A, B, C, ROUNDS = 3.4445, -4.7750, 2.0315, 5


class Muon(torch.optim.Optimizer):
    """`matrices` are moved by Muon, `others` by AdamW, both decayed; `free` (embeddings, norms, biases) by Adam.

    One rate serves both since an orthogonal update is scaled to 0.2 of it per element, about what Adam's is
    (Liu et al., 2025, "Muon is scalable for LLM training").
    """

    def __init__(
        self,
        matrices: ParamsT,
        others: ParamsT,
        free: ParamsT,
        lr: float,
        weight_decay: float,
        others_rate: float = 1.0,
    ) -> None:
        groups: list[dict[str, Any]] = [{"params": list(matrices)}]
        groups.append({"params": list(others), "lr": lr * others_rate})
        groups.append({"params": list(free), "weight_decay": 0.0})
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices, *others = self.param_groups
        by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for parameter in with_gradient(matrices["params"]):
            by_shape[tuple(sorted(parameter.shape))].append(parameter)
        for parameters in by_shape.values():
            self._orthogonal_step(parameters, matrices["lr"], matrices["weight_decay"])
        for group in others:
            for parameter in with_gradient(group["params"]):
                self._adam_step(parameter, group["lr"], group["weight_decay"])
        return loss

    def _orthogonal_step(self, parameters: list[Tensor], lr: float, weight_decay: float) -> None:
        """Nesterov momentum of matrices of one shape (either way round), orthogonalised in one batch."""
        momenta = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - MOMENTUM)
            momenta.append(wide(parameter.grad.lerp(state["momentum"], MOMENTUM)))
        scale = 0.2 * max(parameters[0].shape) ** 0.5
        for parameter, update_RC in zip(parameters, orthogonalised(torch.stack(momenta)), strict=True):
            parameter.mul_(1 - lr * weight_decay)
            parameter.add_(update_RC if parameter.shape == update_RC.shape else update_RC.T, alpha=-lr * scale)

    def _adam_step(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        parameter.mul_(1 - lr * weight_decay)
        state = self.state[parameter]
        if not state:
            state |= {"step": torch.tensor(0.0), "mean": torch.zeros_like(parameter)}
            state["square"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = float(state["step"])
        state["mean"].lerp_(parameter.grad, 1 - BETAS[0])
        state["square"].mul_(BETAS[1]).addcmul_(parameter.grad, parameter.grad, value=1 - BETAS[1])
        spread = (state["square"] / (1 - BETAS[1] ** step)).sqrt_().add_(EPSILON)
        parameter.addcdiv_(state["mean"], spread, value=-lr / (1 - BETAS[0] ** step))


def with_gradient(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that the last backward pass reached."""
    return [parameter for parameter in parameters if parameter.grad is not None]


def wide(matrix: Tensor) -> Tensor:
    """The matrix with no more rows than columns."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def orthogonalised(matrices_MRC: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix of each, roughly: Newton-Schulz rounds X <- (A + B XX' + C (XX')^2) X.

    Every round is a polynomial of the first XX', so a matrix much wider than high has R x R products until the end.
    """
    norms_M11 = matrices_MRC.flatten(1).norm(dim=1)[:, None, None]
    X_MRC = matrices_MRC / (norms_M11 + 1e-7)
    rows, columns = X_MRC.shape[1:]
    if columns < 2 * rows:
        for _ in range(ROUNDS):
            X_MRC = polynomial(X_MRC @ X_MRC.mT) @ X_MRC
        return X_MRC
    gram_MRR = X_MRC @ X_MRC.mT
    product_MRR = torch.eye(rows, device=X_MRC.device).expand_as(gram_MRR)
    for _ in range(ROUNDS):
        factor_MRR = polynomial(gram_MRR)
        product_MRR = factor_MRR @ product_MRR
        gram_MRR = factor_MRR @ gram_MRR @ factor_MRR
    return product_MRR @ X_MRC


def polynomial(gram_MRR: Tensor) -> Tensor:
    """A I + B G + C G^2 of each symmetric G."""
    result_MRR = torch.baddbmm(gram_MRR, gram_MRR, gram_MRR, beta=B, alpha=C)
    result_MRR.diagonal(dim1=1, dim2=2).add_(A)
    return result_MRR
