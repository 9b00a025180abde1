"""`python -P -m multimesh.launch.rank`: one rank under mmrun."""

from multimesh.launch.rank.supervisor import main

main()
