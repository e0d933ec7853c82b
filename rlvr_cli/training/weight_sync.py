"""The weights that the sampler works with, where they are not the trainer's."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from rlvr_cli.models.policy import Policy, distinct

_LAGGING = "lagging/"  # of a checkpoint's tensors, those of a `Snapshot`


@dataclass(frozen=True)
class Snapshot:
    """The weights of the policy after so many updates, on the CPU."""

    version: int
    weights: dict[str, Tensor]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Them, as a checkpoint keeps them."""
        return {f"{_LAGGING}{name}": tensor for name, tensor in self.weights.items()}

    @staticmethod
    def of_tensors(tensors: Mapping[str, Tensor], *, version: int) -> "Snapshot":
        """What `tensors` gave."""
        names = [name for name in tensors if name.startswith(_LAGGING)]
        return Snapshot(version, {name.removeprefix(_LAGGING): tensors[name] for name in names})

    @contextmanager
    def in_place_of(self, policy: Policy) -> Iterator[None]:
        """The policy has these weights for a while; then its own again, bit for bit."""
        present = distinct(policy.weights())
        kept = {name: tensor.detach().clone() for name, tensor in present.items()}
        try:
            for name, tensor in present.items():
                tensor.copy_(self.weights[name])
            yield
        finally:
            for name, tensor in present.items():
                tensor.copy_(kept[name])
