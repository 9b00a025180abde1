"""What a stage is: from registered tasks and a traced step to compiled programs.

meshes      submeshes, and how users say which devices they mean
tasks       a submesh, and what logical axis names mean on it
registry    what the user registered: patterns over module scopes, and their tasks
options     what the user chose of how a step is cut
trace       the whole step as one jaxpr, with logical axes
scopes      what an equation's name stack says
forwarding  which results of a function are its arguments
labels      the task of each scope of a step
flat        a step as one list of labelled equations before, in and after the microbatch loop
sections    what the loop and the rest have to do with each other
flatten     makes that list of a traced step
counters    what only counts microbatches is computed from their number
rematerialize  each stage recomputes its own part of a remat that spans several
hoist       what does not change with the microbatch leaves the loop
placement   the submesh of each equation
widening    the smaller value crosses
accumulate  one accumulator for each submesh that feeds a gradient
partition   placed equations become tasks
shardings   how each value lies on the devices of a submesh
cut         runs the passes above, in order
program     compiles a task
initialize  makes each part of the state where it lives

Each pass is a function of data to data; nothing is compiled before `program`.
"""
