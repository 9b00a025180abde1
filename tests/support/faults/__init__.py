"""What goes wrong on one rank, and what every job then owes its user.

cells      the matrix, as data, and the few cells that cover it
program/   the training program that the fault hits
limits     what cannot hold, under which launcher, and why
timing     how long a job may take
launchers  how each launcher starts it, and whether this machine can
job        runs one cell and records how it ended
contract   what must hold of that
table      all of this as the table of docs/faults.md
cli        scripts/fault-matrix: as many cells as one likes
"""
