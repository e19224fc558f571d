"""The states of a contender that are timed, in a form that is sent to its process: what is NOT computed, and where."""

from typing import Any

from dejavu.models.anatomy import KINDS
from dejavu.models.shape import Shape
from dejavu.predictors.bundle import Bundle
from dejavu.schema import Config, Sparsity
from dejavu.sparsity.budget import Budget, requested_ratios
from dejavu.sparsity.calibration import choose_budget

Variant = dict[str, Any]  # mlp, heads: fractions NOT computed; budget: its kind; kept: units that each layer computes
DENSE = Sparsity("dense")


def variant(shape: Shape, sparsity: Sparsity, bundle: Bundle | None = None) -> Variant:
    """The state that a config's sparsity asks for. Raises as `choose_budget`."""
    mlp, heads = requested_ratios(sparsity)
    budget = choose_budget(sparsity, shape, bundle).budget
    kept = {kind: list(budget.of(kind)) for kind in KINDS}
    return {"mlp": mlp, "heads": heads, "budget": sparsity.budget, "kept": kept}


def budget_of(state: Variant) -> Budget:
    """The units that each layer computes."""
    return Budget(*(tuple(state["kept"][kind]) for kind in KINDS))


def engine_variants(config: Config, shape: Shape, bundle: Bundle | None) -> list[Variant]:
    """This project's engine: dense, and every ratio with every kind of budget."""
    asked = [
        Sparsity("predictor", ratio=ratio, budget=budget, head_unit=config.sparsity.head_unit)
        for budget in config.benchmark.budgets or [config.sparsity.budget]
        for ratio in config.benchmark.ratios
    ]
    return [variant(shape, sparsity, bundle) for sparsity in (DENSE, *asked)]
