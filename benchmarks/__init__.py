"""Side by side with others: the same work, on the same machine, in the same run.

    python -m benchmarks [NAME[/CASE] ...] [--quick] [--output FOLDER]

A benchmark is a module of this package whose name stands in `NAMES`. It says what is compared, and nothing of how:

    TITLE      one line, a heading of the results.
    CASES      {name: compare.Case}: each a piece of work, with the parameters that both sides are given, how often it
               is done, and the figures to reach.
    SIDES      {name: class}: who does it, each a `sides.Side`; the first is ours, the others are its peers. A peer
               whose `needs` are not installed is left out, and the results say so.
    write_inputs(parameters, folder)
               optional: writes what all sides read (weights, batches), so that neither making it nor the libraries
               that make it count towards the memory of a side.
    draw(rows, folder)
               optional: a plot of the benchmark's own; its rows are then left out of `ratios.png`. A row is what
               `compare.compare` returns.

A side's object lives in a process of its own. It is built from the parameters and the folder, `check` gives figures
that must agree with the other sides' before anything is timed, and `run(turn)` does the work once and says how long it
took. The sides take turns, and their speeds are divided turn by turn, so that what slows the machine for a while slows
both. The memory is the most that a process ever had: a side imports what it needs, and no more, when it is built.

`pretraining` is the one to start reading from. What all benchmarks give is collected by `report`.
"""

NAMES = ("pretraining", "scaling", "encoding", "generation", "preparation", "recurrent", "convergence")
