"""What is recorded of a forward pass: at every block the two residuals and the contributions of heads and neurons.

Shape suffixes: B sequences, T time, R rows (all tokens of a batch), N rows kept (no padding), D width, H heads,
K head_dim, E = heads * head_dim, F neurons.
"""

from torch import Tensor

from dejavu.activations.encode import compressed
from dejavu.activations.layout import COMPRESSED, kept_neurons, layer_file, recorded_layers, tapped_layers
from dejavu.activations.writer import CacheWriter
from dejavu.models.anatomy import Anatomy
from dejavu.models.contribution import Contributions
from dejavu.models.observe import Observer


class Recorder(Observer):
    """Hands what it sees to the writer at once, holding at most one tensor twice. Call `begin` before each pass.

    All of it on the model's own thread: packing and writing cost an eighth of the model's time, and threads beside it
    cost more than that, since each parallel loop of the model then waits for the core that they are on.
    """

    def __init__(self, anatomy: Anatomy, writer: CacheWriter) -> None:
        self.anatomy = anatomy
        self.writer = writer
        self.dense = writer.head["encoding"] == "dense"
        self.most = kept_neurons(writer.head["encoding"], writer.head["top"], anatomy.neurons)
        self.contributions = Contributions(anatomy)
        self.recorded = frozenset(recorded_layers(writer.head))
        self.tapped = frozenset(tapped_layers(sorted(self.recorded)))
        self._rows_N: Tensor | None = None

    def begin(self, keep_BT: Tensor | None) -> None:
        """Which tokens of the coming pass are recorded, bool (B, T), False for padding; None: all of them."""
        self._rows_N = None if keep_BT is None else keep_BT.reshape(-1).nonzero().view(-1)

    def residual(self, layer: int, residual_RD: Tensor) -> None:
        if layer in self.tapped:
            self._append("residual", layer, self._kept(residual_RD).half())

    def heads(self, layer: int, heads_RE: Tensor) -> None:
        if layer not in self.recorded:
            return
        heads_NHK = self._kept(heads_RE).unflatten(1, (self.anatomy.heads, self.anatomy.head_dim))
        self._append("heads", layer, self.contributions.of_heads(layer, heads_NHK).half())

    def middle(self, layer: int, middle_RD: Tensor) -> None:
        if layer in self.tapped:
            self._append("middle", layer, self._kept(middle_RD).half())

    def neurons(self, layer: int, activations_RF: Tensor) -> None:
        if layer not in self.recorded:
            return
        c_NF = self.contributions.of_neurons(layer, self._kept(activations_RF))
        if self.dense:
            self._append("mlp", layer, c_NF.half())
            return
        for kind, values in zip(COMPRESSED, compressed(c_NF, c_NF.half(), self.most), strict=True):
            self.writer.append(layer_file(kind, layer), values)

    def _kept(self, values_RX: Tensor) -> Tensor:
        return values_RX if self._rows_N is None else values_RX[self._rows_N]

    def _append(self, kind: str, layer: int, values: Tensor) -> None:
        self.writer.append(layer_file(kind, layer), values.cpu().numpy())
