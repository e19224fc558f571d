"""What calibration measures on blocks of text: loss with units left out, and how far each group's best units reach.

Shape suffixes: N blocks, T tokens, B blocks of a batch, R tokens of a batch, U units, V vocabulary.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dejavu.errors import DataError
from dejavu.models.anatomy import KINDS
from dejavu.models.load import LoadedModel
from dejavu.sparsity.budget import everything
from dejavu.sparsity.calibration import Group
from dejavu.sparsity.layers import Sparsifier
from dejavu.sparsity.selectors import Choice, Selector, Tokens


def batches(blocks_NT: np.ndarray, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tokens]]:
    """Token ids (B, T) of some blocks at a time, and who their tokens are."""
    for first in range(0, len(blocks_NT), size):
        ids_BT = torch.from_numpy(blocks_NT[first : first + size].astype(np.int64)).to(device)
        place_R = torch.arange(ids_BT.numel(), device=device)
        length = ids_BT.shape[1]
        every_R = torch.ones_like(place_R, dtype=torch.bool)
        yield ids_BT, Tokens(every_R, first + place_R // length, place_R % length)


@torch.inference_mode()
def loss(loaded: LoadedModel, blocks_NT: np.ndarray, batch_size: int, sparsifier: Sparsifier | None = None) -> float:
    """Nats a token over blocks, every position but the first scored; sparse where a sparsifier is given.

    Raises DataError for a loss that is not finite.
    """
    total, count = 0.0, 0
    for ids_BT, tokens in batches(blocks_NT, batch_size, loaded.device):
        if sparsifier is None:
            logits_BTV = loaded.model(input_ids=ids_BT, use_cache=False).logits
        else:
            with sparsifier.attached():
                sparsifier.begin(tokens)
                logits_BTV = loaded.model(input_ids=ids_BT, use_cache=False).logits
        wanted_R = ids_BT[:, 1:].reshape(-1)
        total += float(F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), wanted_R, reduction="sum"))
        count += len(wanted_R)
    if not np.isfinite(total):
        raise DataError(f"the loss of {loaded.name} on calibration text is not finite: check its weights")
    return total / count


class Reach(Selector):
    """Leaves nothing out, and counts how much of the contributions another selector's best k units make up."""

    def __init__(self, inner: Selector) -> None:
        self.inner, self.name, self.reads_tap, self.own_tap = inner, inner.name, inner.reads_tap, inner.own_tap
        self.sums: dict[Group, np.ndarray] = {}  # by k = 0 to all
        self.tokens: dict[Group, int] = {}

    def scores(self, choice: Choice) -> Tensor:
        return self.inner.scores(choice)

    def choose(self, choice: Choice, k: int) -> Tensor:
        c_RU = choice.contributions().float()
        scores_RU = torch.atleast_2d(self.inner.scores(choice)).expand(len(c_RU), -1)
        best_RU = c_RU.gather(1, scores_RU.argsort(dim=1, descending=True, stable=True)).double().cumsum(1)
        total_R1 = best_RU[:, -1:]
        share_RU = torch.where(total_R1 > 0, best_RU / total_R1, 1.0)
        group, sums_U = (choice.kind, choice.layer), share_RU.sum(0).cpu().numpy()
        self.sums[group] = self.sums.get(group, 0) + np.concatenate([[0.0], sums_U])
        self.tokens[group] = self.tokens.get(group, 0) + len(c_RU)
        return torch.ones(1, c_RU.shape[1], dtype=torch.bool, device=c_RU.device)


@torch.inference_mode()
def recalls(
    loaded: LoadedModel, blocks_NT: np.ndarray, batch_size: int, selector: Selector, tap: str
) -> dict[Group, np.ndarray]:
    """Recall of mass of a selector's best k units of each group, (U + 1,) for k = 0 to all, on the dense stream."""
    reach, parts = Reach(selector), loaded.anatomy
    sparsifier = Sparsifier(parts, reach, everything(parts), tap=tap, force=True)
    with sparsifier.attached():
        for ids_BT, tokens in batches(blocks_NT, batch_size, loaded.device):
            sparsifier.begin(tokens)
            loaded.model.base_model(input_ids=ids_BT, use_cache=False)
    return {group: sums_U / reach.tokens[group] for group, sums_U in reach.sums.items()}


@torch.inference_mode()
def thresholds(sparsifier: Sparsifier, loaded: LoadedModel, blocks_NT: np.ndarray) -> dict[str, list[float]]:
    """For each kind the cut of each layer above which just its budget's share of scores lies, on the sparse stream.

    Layers that keep everything get the lowest number there is.
    """
    ids_BT, tokens = next(batches(blocks_NT, len(blocks_NT), loaded.device))
    with sparsifier.calibrating(), sparsifier.attached():
        sparsifier.begin(tokens)
        loaded.model.base_model(input_ids=ids_BT, use_cache=False)
    layers = range(loaded.anatomy.layers)
    lowest = float(torch.finfo(torch.float32).min)
    return {kind: [sparsifier.thresholds.get((kind, layer), lowest) for layer in layers] for kind in KINDS}
