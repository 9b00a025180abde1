"""A case trains like plain JAX: the check that most tests of models make."""

from support import cases, oracle, ranks

__all__ = ["trains_like_plain_jax"]


def trains_like_plain_jax(case, rows=8, microbatches=2, steps=3, batches=None, layout=None):
    """Trains a case on one device for each stage, and compares with the plain step.

    Args:
      case: The case.
      rows: Rows of a batch.
      microbatches: How many slices of it.
      steps: How many steps.
      batches: The batches, where the case's own are not meant.
      layout: Where the stages lie.

    Returns:
      What `parallelize_step` returned (its state is donated), and the `Training`.
    """
    batches = batches or case.batches(rows, steps)
    layout = layout or cases.apart(case.stage_count)
    built = cases.build(case, layout, rows, microbatches)
    got = oracle.train_pipeline(built.step_fn, built.train_state, batches)
    oracle.assert_same_training(got, ranks.computed_once(oracle.train, case, batches))
    return built, got
