"""Many processes as one run: their measured steps are pooled, without ever holding one up.

- `layout`: which layers and heads there are on all ranks together.
- `packing`: one rank's step as two arrays that merge by maximum and by sum, and back.
- `channel`: a process group of the probe's own, beside the user's.
- `meeting`: the ranks find each other, in a thread.
- `schedule`: which steps are pooled.
- `queued`: a step on its way to the others; `reduced`: the record that comes back.
- `pool`: composes them; the only file that the probe deals with.
"""
