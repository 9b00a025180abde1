"""Helpers that the tests share: models, their registrations, and the plain-JAX oracle.

models   ordinary Flax models, which know nothing of multimesh
cases    a model with its optimizer, loss, batches and the stages it is cut into
oracle   the same training step in plain JAX on one device, and the comparison with it
plans    the only place that looks inside a built step
"""
