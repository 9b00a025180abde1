"""All tests see eight CPU devices; under `mpirun` they are shared by the ranks."""

from multimesh import init

init(cpus=8)
