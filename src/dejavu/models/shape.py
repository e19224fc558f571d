"""What a model's config says of its sizes, before anything is built: all that bytes and random weights depend on."""

from dataclasses import dataclass


class Units:
    """The heads and neurons of a layer, counted and weighed; the sizes are its subclasses' fields."""

    width: int
    heads: int
    kv_heads: int  # key/value heads; each serves a group of heads
    head_dim: int
    neurons: int
    gated: bool  # the MLP multiplies an activated gate with a second projection

    @property
    def neuron_rows(self) -> int:
        """Matrix rows that one neuron needs, all of the model's width."""
        return 3 if self.gated else 2

    def unit_weights(self, kind: str) -> float:
        """Weights of one unit: a neuron's rows and columns; a head's part of q and o and its share of k and v."""
        if kind == "mlp":
            return self.neuron_rows * self.width
        return 2 * self.width * self.head_dim * (1 + self.kv_heads / self.heads)

    def units(self, kind: str) -> int:
        """How many units of a kind ("mlp" or "heads") one layer has."""
        return self.neurons if kind == "mlp" else self.heads

    def together(self, head_unit: str) -> int:
        """How many neighbouring heads are chosen as one: a key/value group's with head_unit=group."""
        return self.heads // self.kv_heads if head_unit == "group" else 1


@dataclass(frozen=True)
class Shape(Units):
    """Sizes of a model; which fields of a config they stand in is its family's business."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    neurons: int
    vocabulary: int
    context: int  # longest sequence in tokens
    gated: bool
    rms_norm: bool  # norms divide by the root of the mean square; else LayerNorm with a bias
    rotary_base: float | None  # of rotary positions; None: learned ones
    tied: bool  # the output embedding is the input's

    def groups(self, heads: int) -> int:
        """The fewest key/value groups that so many heads lie in."""
        return -(-heads * self.kv_heads // self.heads)
