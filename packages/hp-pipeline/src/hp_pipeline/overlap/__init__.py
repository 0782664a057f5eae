"""A backward and a forward at the same time: two threads that take turns, so that exchanges hide behind computation.

Bottom up: `turns` says whose turn it is, as a value; `coordinator` makes threads wait for theirs; `pair` runs two functions
under it; `exchange` puts its calls around the exchange of a layer; `comm_compute` is what users see.
"""
