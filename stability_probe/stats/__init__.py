"""Attention statistics: pure tensor maths, without hooks and without files.

`catalogue` says what every number means and works without torch; `measure` takes the numbers of
plain tensors; `accumulate` takes them of a captured call, so that they merge over micro-batches
and ranks.
"""
