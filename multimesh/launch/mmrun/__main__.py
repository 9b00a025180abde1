"""`python -m multimesh.launch.mmrun`: the command, for an interpreter of one's choice."""

import sys

from multimesh.launch.mmrun import main

sys.exit(main())
