"""From a composed Hydra config to the typed one: two ways of saying a thing become one, then every value is checked."""

from omegaconf import DictConfig, OmegaConf

from dejavu.checks import check, one_of
from dejavu.errors import ConfigError
from dejavu.schema import PARTS, RULES, Config, Sparsity


def from_config(config: DictConfig) -> Config:
    """The typed, checked form of a composed config. Raises ConfigError with the key, its value and what is allowed."""
    typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), config))
    assert isinstance(typed, Config)
    resolve_point(typed.sparsity)
    forget_what_dense_ignores(typed.sparsity)
    check(typed)
    return typed


def resolve_point(sparsity: Sparsity) -> None:
    """Fill selector, ratio, rule and part from `point`, which is then unset: both ways of saying it are one config.

    Raises ConfigError for a point of another form.
    """
    if sparsity.point is None:
        return
    selector, *fields = sparsity.point.split("@")
    try:
        sparsity.selector, sparsity.ratio = selector, float(fields[0])
    except (IndexError, ValueError):
        raise ConfigError(
            f"sparsity.point={sparsity.point} is not of the form SELECTOR@RATIO, with @RULE or @PART after it if wanted"
        ) from None
    for word in fields[1:]:
        one_of("sparsity.point's rule or part", word, (*RULES, *PARTS))
        if word in RULES:
            sparsity.rule = word
        else:
            sparsity.part = word
    sparsity.point = None


def forget_what_dense_ignores(sparsity: Sparsity) -> None:
    """Nothing is skipped by the dense model, so whatever ratios are said beside it, it is one config and one run."""
    if sparsity.selector == "dense":
        plain = Sparsity(selector="dense", ratio=0.0)
        for key in ("mlp", "heads", "dense_layers", "part", "ratio", "budget", "rule", "head_unit"):
            setattr(sparsity, key, getattr(plain, key))
        for key in ("mlp_layers", "heads_layers", "mlp_schedule", "heads_schedule"):
            setattr(sparsity, key, None)
