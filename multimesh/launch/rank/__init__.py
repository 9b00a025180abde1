"""What mmrun starts in each rank, around the user's program.

supervisor -> binding  gives the rank its share of the cores
-> program  runs the user's Python program as plain `python` would
"""
