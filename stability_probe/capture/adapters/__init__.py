"""What each library's attention call means: from its bound arguments and its result to a `Seen`.

One file per library, each a table of `EntryPoint`s. None of them imports its library.
"""
