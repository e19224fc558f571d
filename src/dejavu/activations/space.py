"""How large an activation cache gets, asked before hours are spent on filling a disk."""

import shutil
from pathlib import Path

from dejavu.activations.layout import SIZES, kept_neurons, resolve_encoding, streams
from dejavu.errors import DataError
from dejavu.models.anatomy import Anatomy

RESERVE = 0.05  # of what is needed
ACTIVE_SHARE = 0.2  # of a ReLU model's neurons, assumed where nobody measured it: larger models have fewer


def estimate_bytes(
    anatomy: Anatomy,
    tokens: int,
    encoding: str,
    top: float,
    active_share: float = ACTIVE_SHARE,
    recorded: list[int] | None = None,
) -> int:
    """Bytes of a cache of `tokens` tokens; `recorded`: of these layers only.

    Exact but for encoding=sparse, where `active_share` is the assumed share of active neurons, and for blocks above
    65,536 tokens (two bytes a token more).
    """
    encoding = resolve_encoding(encoding, anatomy)
    sizes = {key: getattr(anatomy, key) for key in SIZES}
    files = streams({**sizes, "encoding": encoding, "block": 1, "recorded": recorded})
    stored = active_share * anatomy.neurons if encoding == "sparse" else kept_neurons(encoding, top, anatomy.neurons)
    return round(tokens * sum((stored if s.columns is None else s.columns) * s.dtype.itemsize for s in files.values()))


def check_free_space(folder: str | Path, needed: int) -> None:
    """Raise DataError unless the disk of `folder` (which need not exist) has room for `needed` bytes and 5 % more."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed * (1 + RESERVE) > free:
        raise DataError(
            f"the activation cache at {folder} needs about {needed / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB "
            "free: lower corpus.tokens, record fewer layers at a time (collect.layers=[0,1]) or choose a run_dir on "
            "another disk"
        )
