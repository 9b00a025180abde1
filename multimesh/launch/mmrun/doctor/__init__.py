"""`mmrun --doctor`: checks whether this machine can run a job, and says what to do where not.

probes    gather facts, each within a time limit
  -> checks    judge them: pure functions from facts to a `Check`
  -> examine   which checks there are and in which order; prints the table
"""

from multimesh.launch.mmrun.doctor.examine import run_doctor

__all__ = ["run_doctor"]
