"""What a user may choose of how steps are cut; the numbers stay the same."""

from dataclasses import dataclass

__all__ = ["DEFAULTS", "Options"]


@dataclass(frozen=True)
class Options:
    """How a step is cut.

    Attributes:
      autoshard: Whether parameters and batches without annotations are spread over the devices of
        their submesh, along the first dimension that divides.
      fusion: Whether registered tasks on one submesh become one program where they can.
      fusion_outside: Whether that holds outside the microbatch loop too.
      recomputation: Whether what is cheap to compute from the batch is computed by each submesh
        that reads it, rather than sent.
      ignore_transforms: Whether everything runs as plain JAX.
    """

    autoshard: bool = False
    fusion: bool = True
    fusion_outside: bool = True
    recomputation: bool = True
    ignore_transforms: bool = False


DEFAULTS = Options()
